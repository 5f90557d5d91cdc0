// A site that is opened from a folder (file://) may start no web workers, and the search is one. There this Worker runs its
// script in a frame of the page instead; the offline plugin of MkDocs-Material would fetch another such script from a CDN.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inner = frame.contentWindow;
      const load = (source) => new Promise((done, failed) => {
        const script = frame.contentDocument.createElement("script");
        script.src = new URL(source, document.baseURI);
        script.onload = done;
        script.onerror = failed;
        frame.contentDocument.documentElement.append(script);
      });
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = (...sources) => Promise.all(sources.map(load));
      load(address).then(() => {
        this.inner = inner;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }

    postMessage(data) {
      if (this.inner) this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }));
      else this.waiting.push(data);
    }
  };
}
