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
// So make a call that must not be repeated, in an AtMostOnce phase (idempotency.Phase) of one request,
// with Single or a Transport, nothing around them that retries, and the context of the Call. An error
// that proves that nothing was sent leaves its key free; any other one makes it indeterminate.
package keyclient
