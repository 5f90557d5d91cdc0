"""Models whose parameters are of a tensor subclass: conversion, state dicts, wrappers, counted fallbacks."""
