package demo

import "context"

// SetUpAndTearDown makes what a run of a name needs, and removes what it made.
func SetUpAndTearDown(ctx context.Context, databaseURL string, brokers []string, name string) error {
	s, err := setUp(ctx, job{Options: Options{DatabaseURL: databaseURL, Brokers: brokers}, Run: name})
	if err != nil {
		return err
	}
	return s.Remove(ctx)
}
