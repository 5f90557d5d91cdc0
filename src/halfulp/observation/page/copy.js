// Buttons that copy the lines of code beside them; where the browser forbids it, the lines are selected.
(() => {
  "use strict";
  for (const button of document.querySelectorAll("button.copy")) {
    const lines = button.parentElement.querySelector("code");
    const say = (word) => { button.textContent = word; setTimeout(() => { button.textContent = "Copy"; }, 1500); };
    const select = () => { getSelection().selectAllChildren(lines); say("Selected"); };
    button.addEventListener("click", () => {
      if (navigator.clipboard) navigator.clipboard.writeText(lines.textContent).then(() => say("Copied"), select);
      else select();
    });
  }
})();
