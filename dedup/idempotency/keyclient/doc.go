// Package keyclient sends HTTP requests under idempotency keys: to servers that keep them as often as it takes (Transport, Pending), and
// to servers that do not once (Single).
//
//	func main() {
//		transport, err := keyclient.NewTransport(http.DefaultTransport, keyclient.TransportConfig{Honours: []string{"bank.example"}})
//		if err != nil {
//			log.Fatal(err)
//		}
//		bank := &http.Client{Transport: transport} // without a Timeout: see Transport
//		response, err := bank.Post("https://bank.example/charges", "application/json", strings.NewReader(`{"cents":4200}`))
//		if err != nil {
//			log.Fatal(err) // an UnansweredError has the key to ask again under
//		}
//		log.Print(response.Status)
//	}
//
// What a program must not lose when it is killed has a name, and its key is on disk before it is sent: see Pending.
//
// # The trap
//
// Idempotency-Key is a promise of the server's, and net/http takes it for granted: its Transport sends a request that has the header again
// where the connection, used before, closes without an answer, also after the server acted. A server that ignores
// the header acts twice, and neither the program nor its log learns of it. Over HTTP/2 a Transport does that with or without the header, where
// the server resets the stream. And a http.Client sends the body again where a redirect asks for that (307, 308).
//
//	client := &http.Client{Transport: keyclient.Single(http.DefaultTransport)} // sends each request once
//
// So a call that must not be made twice, in a phase that is AtMostOnce (see idempotency.Phase), is made by Single, or by a Transport,
// which does the same there; and by nothing around them that tries again. Make the request with the context of the Call: an
// error then proves that nothing was sent where that is so, and the key of the phase stays free, where any other error puts it
// in doubt. That is for the one request of a phase that acts: one for a token in front of it, under the same context, ends the
// proof.
//
// # What is asked again
//
// A table at Transport says it. A server that was not declared (TransportConfig.Honours), and has not shown, that it keeps keys gets an unsafe
// request again only where nothing was done: a POST that times out is one UnansweredError, and one effect at most.
package keyclient
