// Package proxies puts Toxiproxy between a process and its servers, to cut, delay, slow down and
// silence its connections. It is for tests and for the torture run.
package proxies
