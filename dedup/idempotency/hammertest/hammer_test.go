// Package hammertest_test hammers requests under idempotency keys: two servers that are killed and
// frozen, a PostgreSQL that crashes, clients that hang up and send other bodies, and a judge that
// shares no code with the engine.
//
//	go test ./dedup/idempotency/hammertest -hammer 1m -seed 7
package hammertest_test

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/servers"
)

var (
	hammerFor  = flag.Duration("hammer", 10*time.Second, "how long requests are sent")
	hammerSeed = flag.Uint64("seed", 0, "of what is drawn; 0: a random one")
)

const serverVariable = "EFFECTONCE_TEST_HAMMER"

func TestMain(m *testing.M) {
	if spec := os.Getenv(serverVariable); spec != "" { //nolint:forbidigo // this process is a program, not a test
		_, _ = fmt.Fprintln(os.Stderr, "a server of the hammer ends:", serve(spec))
		os.Exit(1) //nolint:forbidigo // as above
	}
	pgtest.Main(m)
}

func kinds() []string {
	return []string{kindOrder, kindStrict, kindDoubt, kindFlow, kindSingle, kindHook}
}

type hammer struct {
	url     string
	cluster *servers.Postgres // nil: nothing crashes it
	bank    *bank
	seed    uint64
	began   time.Time
	client  *http.Client
	places  [2]place

	mu                      sync.Mutex
	keys                    map[string]*history
	disturbances            atomic.Int64 // odd while one lasts
	kills, freezes, crashes int
}

// place is where one server after the other runs.
type place struct {
	address atomic.Pointer[string]
	cmd     *exec.Cmd
	stdin   io.Closer // its end ends the server
	read    chan struct{}
}

// Property: whatever is killed, frozen, crashed, retried, sent differently or disconnected, a key
// has at most one effect, exactly one if a client got a success, none if it was declined, and all
// copies get the same outcome.
func TestHammer(t *testing.T) {
	longtest.Only(t, "a hammer of random faults")
	t.Parallel()
	seed := *hammerSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("seed %d: the same draws, in another order of events, with -seed %d", seed, seed)
	cluster := pgtest.Cluster(t, map[string]string{"fsync": "on", "max_connections": "300"})
	pgtest.Migrate(t, cluster.URL)
	h := newHammer(t, cluster.URL, seed, spec{})
	h.cluster = cluster
	h.bank.rng = rand.New(rand.NewPCG(seed, 99))
	var over atomic.Bool
	var drivers sync.WaitGroup
	for i := range 8 {
		rng := rand.New(rand.NewPCG(h.seed, uint64(i)+1))
		drivers.Go(func() {
			for n := 0; !over.Load(); n++ {
				h.drive(t.Context(), rng, kinds()[rng.IntN(len(kinds()))], fmt.Sprintf("key-%d-%d", i, n))
			}
		})
	}
	h.disturb(t)
	over.Store(true)
	drivers.Wait()
	h.settle(t)
	for i := range h.places {
		h.kill(i) // and all that it wrote is read
	}
	calm := h.judge(t)
	require.Len(t, calm, len(kinds()), "want undisturbed keys of each kind: otherwise too little was proved")
}

// newHammer starts two servers, of which the first one is armed.
func newHammer(t *testing.T, url string, seed uint64, armed spec) *hammer {
	t.Helper()
	client := &http.Client{Timeout: 15 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	h := &hammer{url: url, seed: seed, bank: newBank(t), began: time.Now(), client: client, keys: map[string]*history{}}
	pgtest.Exec(t, pgtest.Connect(t, url), `CREATE TABLE ledger (key text NOT NULL, step text NOT NULL, body text NOT NULL, exec text NOT NULL)`)
	t.Cleanup(client.CloseIdleConnections)
	for i, s := range []spec{armed, {}} {
		h.start(t, i, s)
		t.Cleanup(func() { h.kill(i) })
	}
	return h
}

// disturb goes through all disturbances in random order, once at least, until the time is over.
func (h *hammer) disturb(t *testing.T) {
	t.Helper()
	rng := rand.New(rand.NewPCG(h.seed, 0))
	length := *hammerFor
	if testing.Short() {
		length = min(length, 3*time.Second)
	}
	var deck []int
	for n, end := 0, h.began.Add(length); n < 5 || time.Now().Before(end); n++ {
		if n%5 == 0 {
			deck = rng.Perm(5)
		}
		// Nothing to wait for: so long requests run undisturbed.
		pause.For(t.Context(), time.Duration(300+rng.IntN(900))*time.Millisecond)
		i := rng.IntN(len(h.places))
		h.disturbances.Add(1)
		switch deck[n%5] {
		case 0, 1:
			h.kills++
			h.kill(i)
			h.start(t, i, spec{})
		case 2, 3: // often for longer than a lock lasts, and an idle transaction
			h.freezes++
			require.NoError(t, h.places[i].cmd.Process.Signal(syscall.SIGSTOP))
			pause.For(t.Context(), time.Duration(rng.IntN(4000))*time.Millisecond)
			require.NoError(t, h.places[i].cmd.Process.Signal(syscall.SIGCONT))
		default:
			h.crashes++
			require.NoError(t, h.cluster.Kill(t.Context()))
			require.NoError(t, h.cluster.Restart(t.Context()))
		}
		h.disturbances.Add(1)
	}
}

func (h *hammer) start(t *testing.T, i int, s spec) {
	t.Helper()
	p := &h.places[i]
	s.URL, s.Bank, s.Seed = h.url+"&pool_max_conns=24", h.bank.URL, h.seed+uint64(h.disturbances.Load())+uint64(i)
	text, err := json.Marshal(s)
	require.NoError(t, err)
	p.cmd = exec.CommandContext(t.Context(), os.Args[0], "-test.run=^$")
	p.cmd.Env = append(os.Environ(), serverVariable+"="+string(text))
	if testing.Verbose() {
		p.cmd.Stderr = os.Stderr
	}
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	p.stdin, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	lines := bufio.NewScanner(out)
	require.True(t, lines.Scan(), "the server does not start")
	address := strings.TrimPrefix(lines.Text(), "listens ")
	p.address.Store(&address)
	p.read = make(chan struct{})
	go func() {
		defer close(p.read)
		for lines.Scan() {
			if words := strings.Fields(lines.Text()); len(words) == 4 && words[0] == "ran" {
				h.mu.Lock()
				k := h.keys[words[1]]
				k.ran = append(k.ran, words[3]+" "+words[2])
				h.mu.Unlock()
			}
		}
	}()
}

// kill ends a server, and returns when all that it wrote is read.
func (h *hammer) kill(i int) {
	p := &h.places[i]
	_ = p.cmd.Process.Kill()
	<-p.read
	_ = p.cmd.Wait()
	_ = p.stdin.Close()
}

func (h *hammer) history(kind, key string) *history {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.keys[key] = &history{kind: kind, key: key}
	return h.keys[key]
}

// drive sends up to a hundred copies of a request at once, and then asks until one gets an outcome.
func (h *hammer) drive(ctx context.Context, rng *rand.Rand, kind, key string) {
	k := h.history(kind, key)
	copies := 1 + rng.IntN(8)
	if rng.IntN(16) == 0 {
		copies = 100
	}
	began, before := time.Now(), h.disturbances.Load()
	var group sync.WaitGroup
	for range copies {
		body, patience, place := "A", 15*time.Second, rng.IntN(2)
		if rng.IntN(10) == 0 {
			body = "B"
		}
		if rng.IntN(10) == 0 {
			patience = time.Duration(rng.IntN(50)) * time.Millisecond
		}
		group.Go(func() {
			for range 2 {
				if h.ask(ctx, k, place, body, patience).over() {
					return
				}
			}
		})
	}
	group.Wait()
	known := false
	for try := 0; try < 5 && !known; try++ {
		a := h.ask(ctx, k, try%2, "A", 15*time.Second)
		known = a.over() && a.Status != http.StatusUnprocessableEntity
	}
	// Within a second no lock runs out, and no timeout: this machine may are halted, too.
	k.calm = known && before%2 == 0 && h.disturbances.Load() == before && time.Since(began) < time.Second
}

// ask sends a request to a server, and notes the answer.
func (h *hammer) ask(ctx context.Context, k *history, place int, body string, patience time.Duration) answer {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	a := answer{Body: body, Place: place}
	header, err := h.send(ctx, k, &a)
	if err != nil {
		a.Status, a.Text = 0, err.Error()
	}
	problem := header.Get("Content-Type") == "application/problem+json"
	a.Undecided = problem && strings.Contains(a.Text, "idempotency-key-undecided")
	a.Kept = !problem && a.Status != 0 && a.Status != http.StatusUnprocessableEntity && a.Status != http.StatusConflict &&
		a.Status != http.StatusTooManyRequests && (a.Status < 500 || k.kind == kindStrict)
	a.At = time.Since(h.began).Round(time.Millisecond)
	h.mu.Lock()
	k.answers = append(k.answers, a)
	h.mu.Unlock()
	if a.Status == 0 || a.Status >= 500 && !a.Kept {
		pause.For(ctx, 50*time.Millisecond) // a server is being started again
	}
	return a
}

func (h *hammer) send(ctx context.Context, k *history, a *answer) (http.Header, error) {
	url := "http://" + *h.places[a.Place].address.Load() + "/" + k.kind
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(a.Body))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Idempotency-Key", k.key)
	request.Header.Set("Content-Type", "text/plain")
	response, err := h.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	a.Status, a.Text = response.StatusCode, string(text)
	if k.kind == kindHook && a.Text == "refused\n" { // a sender gets 200
		a.Status = http.StatusPaymentRequired
	}
	return response.Header, err
}

// settle asks every key again, with both bodies, until it is answered: nothing is disturbed any
// more.
func (h *hammer) settle(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	todo := make(chan *history, len(h.keys))
	for _, k := range h.keys {
		todo <- k
	}
	close(todo)
	var group sync.WaitGroup
	for range 16 {
		group.Go(func() {
			for k := range todo {
				for _, body := range []string{"A", "B"} {
					for try := 0; ctx.Err() == nil && !h.ask(ctx, k, try%2, body, 15*time.Second).over(); try++ {
						pause.For(ctx, 20*time.Millisecond)
					}
				}
			}
		})
	}
	group.Wait()
	assert.NoError(t, ctx.Err(), "keys are not answered")
}

// bank charges for each key, and remembers how often. It deduplicates only requests that have an
// Idempotency-Key.
type bank struct {
	*httptest.Server

	mu      sync.Mutex
	rng     *rand.Rand     // nil: it always charges
	decided map[string]int // status by Idempotency-Key
	charges map[string]int // by the hammer's key
}

func newBank(t *testing.T) *bank {
	t.Helper()
	b := &bank{decided: map[string]int{}, charges: map[string]int{}}
	b.Server = httptest.NewServer(b)
	t.Cleanup(b.Close)
	return b
}

func (b *bank) charged(key string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.charges[key]
}

func (b *bank) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b.mu.Lock()
	defer b.mu.Unlock()
	id := r.Header.Get("Idempotency-Key")
	status, known := b.decided[id]
	lot := 10
	if b.rng != nil {
		lot = b.rng.IntN(20)
	}
	switch {
	case known && id != "":
	case lot < 3:
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	case lot < 6:
		status = http.StatusPaymentRequired
	default:
		status = http.StatusOK
		b.charges[r.Header.Get("Key")]++
	}
	b.decided[id] = status
	if lot == 19 {
		panic(http.ErrAbortHandler) // its answer is lost
	}
	w.WriteHeader(status)
}

// answer is what a client got.
type answer struct {
	At        time.Duration // since the start
	Place     int
	Body      string // of the request
	Status    int    // 0: none
	Kept      bool   // an outcome, which every copy has to get
	Undecided bool   // a person has to decide
	Text      string
}

// over reports whether another try is answered the same.
func (a answer) over() bool {
	return a.Kept || a.Undecided || a.Status == http.StatusUnprocessableEntity
}

// history is what is known of a key from outside.
type history struct {
	kind, key string

	answers []answer
	ran     []string // the outcomes that its handler came to; not each is stored, since servers die
	calm    bool     // nothing was killed, frozen or crashed between the first request and the first outcome
}

// effect is a row of the ledger.
type effect struct{ Key, Step, Body, Exec string }

// verdict says what is wrong with a key. charges is how often the bank charged for it, state what
// is stored of it.
func (h *history) verdict(effects []effect, charges int, state string) []string {
	wrong := map[string]bool{}
	when := func(is bool, text string) {
		if is {
			wrong[text] = true
		}
	}
	outcome, undecided, mismatched, want := answer{}, false, map[string]bool{}, 0
	for _, a := range h.answers {
		undecided = undecided || a.Undecided
		switch {
		case a.Status == http.StatusUnprocessableEntity:
			mismatched[a.Body] = true
		case a.Kept && outcome.Status == 0:
			outcome = a
		case a.Kept:
			when(a.Status != outcome.Status || a.Text != outcome.Text, "copies were answered differently")
			when(a.Body != outcome.Body && h.kind != kindHook, "two bodies got the outcome") // of an event the ID decides
		}
	}
	if outcome.Status >= 200 && outcome.Status < 300 {
		want = 1
	}
	by := map[string]int{}
	for _, e := range effects {
		by[e.Step]++
		when(by[e.Step] > 1, "an effect twice")
		when(mismatched[e.Body], "an effect of a body that was a mismatch")
		when(e.Step == "order" && want == 1 && h.kind != kindHook && "exec "+e.Exec != outcome.Text, "the effect is not of the execution that is answered")
	}
	answered := outcome.Status != 0
	when(len(mismatched) > 1, "both bodies were a mismatch")
	when(!answered && (!undecided || h.kind != kindDoubt && h.kind != kindSingle), "it was never answered")
	when(answered && state != "finished" || !answered && state != "indeterminate", "what is stored is "+state)
	when(answered && undecided && h.calm, "it was in doubt, and was executed again")
	when(by["order"] > want, "an effect, and no client was told so")
	when(by["order"] < want, "no effect, and a client was told so")
	when((h.kind == kindFlow || h.kind == kindSingle) && (by["reserve"] < want || by["charge"] < want), "the effect of a phase is missing")
	when(charges > 1, "it was charged twice")
	when(answered && (h.kind == kindFlow || h.kind == kindSingle) && charges != want, "the charge does not fit the answer")
	// A server that dies takes the outcome with it that its handler came to, and the next run may
	// come to another. Otherwise the first one counts: what was declined is not tried again by a
	// copy.
	when(h.calm && len(h.ran) > 1, "its handler came to another outcome, and nothing was disturbed")
	return slices.Sorted(maps.Keys(wrong))
}

func (h *history) String() string {
	lines := []string{fmt.Sprintf("%s %s, undisturbed: %v", h.kind, h.key, h.calm)}
	for _, r := range h.ran {
		lines = append(lines, "  ran      "+r)
	}
	for _, a := range h.answers {
		lines = append(lines, fmt.Sprintf("  answered %+v", a))
	}
	return strings.Join(lines, "\n")
}

// shownMax is how many histories are printed.
const shownMax = 3

// judge compares what clients and bank know with the tables, which it reads by statements of its
// own. It returns how many keys of each kind were undisturbed.
func (h *hammer) judge(t *testing.T) (calm map[string]int) {
	t.Helper()
	conn := pgtest.Connect(t, h.url)
	rows, err := conn.Query(t.Context(), `SELECT key, step, body, exec FROM ledger`)
	require.NoError(t, err)
	ledger, err := pgx.CollectRows(rows, pgx.RowToStructByPos[effect])
	require.NoError(t, err)
	effects := map[string][]effect{}
	for _, e := range ledger {
		effects[e.Key] = append(effects[e.Key], e)
	}
	states := map[string]string{}
	rows, err = conn.Query(t.Context(), `SELECT key, CASE WHEN state = 'finished' AND finished_at IS NULL THEN 'without an outcome' ELSE state END FROM effectonce.idempotency_keys`)
	require.NoError(t, err)
	var key, state string
	_, err = pgx.ForEachRow(rows, []any{&key, &state}, func() error { states[key] = state; return nil })
	require.NoError(t, err)
	calm = map[string]int{}
	statuses, wrongs, shown := map[int]int{}, map[string]int{}, 0
	for _, k := range h.keys {
		if k.calm {
			calm[k.kind]++
		}
		for _, a := range k.answers {
			statuses[a.Status]++
		}
		wrong := k.verdict(effects[k.key], h.bank.charged(k.key), states[k.key])
		for _, text := range wrong {
			wrongs[k.kind+": "+text]++
		}
		if len(wrong) > 0 && shown < shownMax {
			shown++
			t.Errorf("seed %d: %s\n%v\n  effects  %+v", h.seed, strings.Join(wrong, "; "), k, effects[k.key])
		}
	}
	t.Logf("seed %d: %d keys, %d kills, %d freezes, %d crashes of PostgreSQL; answers by status %v; undisturbed keys %v",
		h.seed, len(h.keys), h.kills, h.freezes, h.crashes, statuses, calm)
	require.Empty(t, wrongs)
	return calm
}
