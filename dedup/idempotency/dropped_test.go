package idempotency_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: a phase that panics, or ends its goroutine, frees its key at once: the next request
// continues there, however long the lock is. If its call must not be repeated, the key is in doubt
// at once. The panic reaches the caller unchanged. Rows H1, H5 of guarantees.md.
func TestPhaseThatDoesNotReturnFreesItsLock(t *testing.T) {
	t.Parallel()
	pool := newPool(t)
	for how, end := range map[string]func(){"panic": func() { panic("nil map") }, "goexit": runtime.Goexit} {
		for _, where := range []string{"call", "write"} {
			bothModes(t, how+" "+where+", at most once", func(t *testing.T, atMostOnce bool) {
				t.Helper()
				value, ends := fmt.Sprint(how, " ", where, " at most once ", atMostOnce), true
				dies := func(at string) {
					if ends && at == where {
						end()
					}
				}
				flow := newFlow(t, newOperation(t, pool, idempotency.Config{Lock: time.Hour}), idempotency.FlowConfig[payment]{}, []idempotency.Phase[payment]{{
					Name: "charge", AtMostOnce: atMostOnce,
					Call: func(context.Context, *step) error { dies("call"); return nil },
					Write: func(ctx context.Context, tx pgx.Tx, s *step) error {
						s.Finish(idempotency.Response{Status: 201})
						err := effect(ctx, tx, value)
						dies("write")
						return err
					},
				}})
				var panicked any
				over := make(chan struct{})
				go func() {
					defer close(over)
					defer func() { panicked = recover() }()
					_, _ = flow.Do(t.Context(), key(value), nil)
				}()
				<-over
				require.Equal(t, how == "panic", panicked == "nil map", panicked)
				require.Zero(t, effects(t, pool, value))
				ends = false
				_, err := flow.Do(t.Context(), key(value), nil)
				if atMostOnce {
					require.ErrorIs(t, err, idempotency.ErrIndeterminate)
					require.Equal(t, "indeterminate", stateOf(t, pool, value))
					return
				}
				require.NoError(t, err, value)
				require.Equal(t, 1, effects(t, pool, value))
			})
		}
	}
}
