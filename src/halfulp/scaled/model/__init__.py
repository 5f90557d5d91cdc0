"""Models with scaled parameters: conversion and back, their inputs, their files, their gradients between processes."""
