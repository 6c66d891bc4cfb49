package idempotency_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// Property: with Seal set, a response that plain SQL stored in clear is not replayed, whatever the
// row's columns say. The work does not run again, and the hook reports it. Sealed responses are
// replayed as before. Row S26 of guarantees.md.
func TestForgedResponsesAreNotReplayed(t *testing.T) {
	t.Parallel()
	for name, forge := range map[string]string{
		"all in clear":                  `sealed = false, body = 'forged', headers = NULL`,
		"a body, and no word of it":     `body = 'forged', headers = NULL`,
		"headers":                       `sealed = false, body = NULL, headers = '{"Location": ["/forged"]}'`,
		"headers beside a sealed body":  `headers = '{"Location": ["/forged"]}'`,
		"a sealed body called in clear": `sealed = false`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			var told []idempotency.Verdict
			seal := newSealer(t, "old", "old")
			cfg := idempotency.Config{Seal: seal, Hooks: idempotency.Hooks{Answered: func(_ string, v idempotency.Verdict) { told = append(told, v) }}}
			_, err := payWith(t, pool, cfg, "a", []byte("body"))
			require.NoError(t, err)
			_, err = payWith(t, pool, cfg, "b", []byte("body"))
			require.NoError(t, err)
			_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET `+forge+` WHERE key = $1`, key("a").Value)
			require.NoError(t, err)
			response, err := payWith(t, pool, cfg, "a", []byte("body"))
			require.ErrorIs(t, err, idempotency.ErrUnreadable)
			require.Empty(t, response.Body)
			require.Empty(t, response.Header)
			if name != "a body, and no word of it" { // that one cannot be opened
				require.ErrorIs(t, err, idempotency.ErrUnsealed)
				require.Equal(t, []idempotency.Verdict{idempotency.Executed, idempotency.Executed, idempotency.Unsealed}, told)
			}
			_, err = payWith(t, pool, cfg, "b", nil)
			require.NoError(t, err)
			require.Equal(t, 1, effects(t, pool, "a"))
		})
	}
}

// Property: a flow whose row is marked as stored in clear continues from no forged state, makes no
// call, and stores nothing in clear; with AcceptUnsealed one that began before there was a Sealer
// continues.
func TestForgedStatesAreNotGoneOnFrom(t *testing.T) {
	t.Parallel()
	for name, forge := range map[string]string{
		"a state":   `sealed = false, data = '{"Card": "forged"}'`,
		"no state":  `sealed = false, data = NULL`,
		"a request": `sealed = false, request = 'forged', data = NULL`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := newPool(t)
			fails, calls := true, 0
			flowOf := func(cfg idempotency.Config) *idempotency.Flow[struct{ Card string }] {
				type state = struct{ Card string }
				flow, err := idempotency.NewFlow(newOperation(t, pool, cfg), idempotency.FlowConfig[state]{StoreRequest: name != "no state"},
					idempotency.Phase[state]{Name: "read", Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[state]) error {
						step.State.Card = string(step.Request)
						return effect(ctx, tx, "read")
					}},
					idempotency.Phase[state]{Name: "pay", Call: func(context.Context, *idempotency.Step[state]) error {
						if fails {
							return errors.New("later")
						}
						calls++
						return nil
					}, Write: func(ctx context.Context, tx pgx.Tx, step *idempotency.Step[state]) error {
						step.Finish(idempotency.Response{Status: 201, Body: []byte(step.State.Card)})
						return effect(ctx, tx, "pay")
					}})
				require.NoError(t, err)
				return flow
			}
			sealed := idempotency.Config{Seal: newSealer(t, "old", "old")}
			_, err := flowOf(sealed).Do(t.Context(), key("a"), []byte(canary))
			require.Error(t, err)
			fails = false
			_, err = pool.Exec(t.Context(), `UPDATE effectonce.idempotency_keys SET retry_at = NULL, `+forge)
			require.NoError(t, err)
			_, err = flowOf(sealed).Do(t.Context(), key("a"), []byte(canary))
			require.ErrorIs(t, err, idempotency.ErrUnsealed)
			if name != "no state" {
				_, err = flowOf(sealed).Complete(t.Context())
				require.ErrorIs(t, err, idempotency.ErrUnsealed)
			}
			require.Zero(t, calls)
			require.Zero(t, effects(t, pool, "pay"))
			require.Equal(t, 1, effects(t, pool, "read"))
			require.NotContains(t, dump(t, pool), canary)
			sealed.AcceptUnsealed = true
			response, err := flowOf(sealed).Do(t.Context(), key("a"), []byte(canary))
			require.NoError(t, err)
			require.Equal(t, 201, response.Status)
			require.Equal(t, 1, effects(t, pool, "pay"))
		})
	}
}
