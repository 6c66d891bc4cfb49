package demo

import "context"

// SetUpAndTearDown makes what a run of a name needs, and removes what it made.
func SetUpAndTearDown(ctx context.Context, databaseURL string, brokers []string, name string) error {
	s, err := setUp(ctx, job{DatabaseURL: databaseURL, Brokers: brokers, Schema: name, Topic: name, Group: name})
	if err != nil {
		return err
	}
	return s.Remove(ctx)
}
