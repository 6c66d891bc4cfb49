// Package keyclient sends HTTP requests with idempotency keys. Transport retries requests to servers
// that honour keys; Pending keeps their keys across restarts; Single sends a request once, to
// servers that do not.
//
//	func main() {
//		transport, err := keyclient.NewTransport(nil, keyclient.TransportConfig{Honours: []string{"bank.example"}})
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
// # The trap
//
// http.Transport repeats a request that has an Idempotency-Key if a reused connection closes without
// a response, even after the server acted. A server that ignores the header acts twice, and neither
// the program nor its log notices. Over HTTP/2 it does that with or without the header, if the server
// resets the stream. And an http.Client sends the body again for a redirect by 307 or 308.
//
//	client := &http.Client{Transport: keyclient.Single(http.DefaultTransport)} // sends each request once
//
// So make a call that must not be repeated, in an AtMostOnce phase (idempotency.Phase), with Single or
// a Transport, with nothing around them that retries, and with the context of the Call: then an error
// proves that nothing was sent if that is the case, and the key of the phase stays free. Any other
// error makes it indeterminate. This holds for a phase with one request.
package keyclient
