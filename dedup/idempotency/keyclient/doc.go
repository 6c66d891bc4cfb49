// Package keyclient sends HTTP requests with idempotency keys. Transport and Pending retry requests
// to servers that honour keys; Single sends a request once, to servers that do not.
//
//	func main() {
//		transport, err := keyclient.NewTransport(http.DefaultTransport, keyclient.TransportConfig{Honours: []string{"bank.example"}})
//		if err != nil {
//			log.Fatal(err)
//		}
//		bank := &http.Client{Transport: transport} // without a Timeout: see Transport
//		response, err := bank.Post("https://bank.example/charges", "application/json", strings.NewReader(`{"cents":4200}`))
//		if err != nil {
//			log.Fatal(err) // an UnansweredError has the key for a retry
//		}
//		log.Print(response.Status)
//	}
//
// A request that must survive the death of the program has a name, and its key is on disk before it
// is sent: see Pending.
//
// # The trap
//
// An Idempotency-Key is a promise by the server, and net/http takes it for granted: http.Transport
// repeats a request that has the header if a reused connection closes without a response, even
// after the server acted. A server that ignores the header acts twice, and neither the program nor
// its log notices. Over HTTP/2 an http.Transport does that with or without the header, if the
// server resets the stream. And an http.Client sends the body again if a redirect requires that
// (307, 308).
//
//	client := &http.Client{Transport: keyclient.Single(http.DefaultTransport)} // sends each request once
//
// So make a call that must not be repeated, in an AtMostOnce phase (see idempotency.Phase), with
// Single, or with a Transport, which behaves the same there, and with nothing around them that
// retries. Make the request with the context of the Call: then an error proves that nothing was
// sent if that is the case, and the key of the phase stays free. Any other error makes it
// indeterminate. This holds for a phase with one request: an earlier one under the same context,
// for example for a token, invalidates the proof.
//
// # What is retried
//
// The documentation of Transport has a table. If a server was not declared to honour keys
// (TransportConfig.Honours), and has not shown that it does, an unsafe request is retried only if
// nothing was done: a POST that times out returns one UnansweredError, and has at most one effect.
package keyclient
