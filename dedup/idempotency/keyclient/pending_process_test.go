package keyclient_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup/idempotency/keyclient"
	"github.com/effectonce/effectonce/internal/pgtest"
)

const payerVariable = "EFFECTONCE_TEST_PAYER"

// payer is a process that asks for one payment. It travels as JSON in the environment.
type payer struct{ Database, Server, Name string }

// pay is the whole program.
func pay(spec string) int {
	var p payer
	err := json.Unmarshal([]byte(spec), &p)
	if err == nil {
		err = p.run(context.Background()) //nolint:forbidigo // the start of a program
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func (p payer) run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, p.Database)
	if err != nil {
		return err
	}
	defer pool.Close()
	pending, err := keyclient.NewPending(pool, keyclient.PendingConfig{Client: "shop"})
	if err != nil {
		return err
	}
	transport, err := keyclient.NewTransport(&http.Transport{}, keyclient.TransportConfig{Honours: []string{"*"}, Pending: pending})
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(keyclient.WithRequestName(ctx, p.Name), http.MethodPost, p.Server, strings.NewReader(p.Name))
	if err != nil {
		return err
	}
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, response.Body)
	return errors.Join(err, response.Body.Close())
}

// start starts it as a process.
func (p payer) start(t *testing.T) *exec.Cmd {
	t.Helper()
	binary, err := os.Executable()
	require.NoError(t, err)
	spec, err := json.Marshal(p)
	require.NoError(t, err)
	client := exec.CommandContext(t.Context(), binary)
	client.Env = append(os.Environ(), payerVariable+"="+string(spec))
	client.Stderr = os.Stderr
	require.NoError(t, client.Start())
	return client
}

// Property: a client that is killed between its attempt and the answer, before or after the server
// acted, finds its request pending after its restart, retries under the same key, and there is one
// effect.
func TestKilledClientAsksAgainUnderItsKey(t *testing.T) {
	t.Parallel()
	for name, acted := range map[string]bool{"before the server acted": false, "after the server acted": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			bank := newBank(t, pool)
			killed := make(chan *os.Process, 1)
			gone := make(chan struct{})
			bank.disturb(func(n int, act func()) {
				if n > 0 {
					act()
					return
				}
				if acted {
					act()
				}
				_ = (<-killed).Kill()
				<-gone
			})
			client := payer{Database: pool.Config().ConnString(), Server: bank.URL, Name: "charge order 4127"}.start(t)
			killed <- client.Process
			err := client.Wait()
			close(gone)
			require.ErrorContains(t, err, "signal: killed")

			pending := newPending(t, pool, keyclient.PendingConfig{})
			left, err := pending.List(t.Context(), "", 10)
			require.NoError(t, err)
			require.Len(t, left, 1)
			again := newClient(t, quick(keyclient.TransportConfig{Pending: pending}))
			status, body, err := do(keyclient.WithRequestName(t.Context(), left[0].Request), t, again, http.MethodPost, bank.URL, left[0].Request)
			require.NoError(t, err)
			require.Equal(t, http.StatusCreated, status)
			require.Equal(t, "paid", body)
			require.Equal(t, []string{left[0].Key, left[0].Key}, bank.keys())
			require.Equal(t, 1, bank.payments(t))
		})
	}
}
