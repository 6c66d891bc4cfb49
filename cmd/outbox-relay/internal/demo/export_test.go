package demo

import (
	"context"
	"errors"
)

// SetUpAndTearDown makes what a run of a name needs, and removes what it made.
func SetUpAndTearDown(ctx context.Context, databaseURL string, brokers []string, name string) error {
	j := job{DatabaseURL: databaseURL, Brokers: brokers, Schema: name, Topic: name, Group: name}
	var m made
	err := setUp(ctx, j, &m)
	return errors.Join(err, tearDown(ctx, j, m))
}
