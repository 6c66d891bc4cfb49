package grpckey

// Answer is the status for an error of the engine, among them those that need many clients at once.
func (i *Interceptor) Answer(err error) error { return refusal(i.problem(err)) }
