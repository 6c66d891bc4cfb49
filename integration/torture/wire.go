package torture

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"time"
)

// wire is the network of one replica: all its connections to PostgreSQL and Kafka.
type wire struct {
	mu     sync.Mutex
	random *rand.Rand
	conns  map[*conn]bool
	frozen chan struct{} // closed by thaw; nil: not frozen
	silent sides         // what is frozen
	lag    time.Duration // of what is sent
	dead   bool
	// unheard is how many of a thousand messages with one of these words are cut after they were sent: unknown outcomes.
	unheard int
	words   []string
}

func newWire(random *rand.Rand, unheard int, words ...string) *wire {
	return &wire{random: random, conns: map[*conn]bool{}, words: words, unheard: unheard}
}

// sides are the servers at the other end.
type sides int

const (
	postgresSide sides = 1
	kafkaSide          = ^postgresSide // every broker; each has a bit of its own
	bothSides          = postgresSide | kafkaSide
)

func brokerSide(n int) sides { return postgresSide << (1 + n) }

var errDead = errors.New("torture: the process is dead")

// dialer connects to PostgreSQL or, if their addresses are given, to brokers.
func (w *wire) dialer(brokers ...string) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		side := postgresSide
		if len(brokers) > 0 {
			side = brokerSide(max(0, slices.Index(brokers, address)))
		}
		raw, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: raw, wire: w, side: side}
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.dead {
			return nil, errors.Join(errDead, raw.Close())
		}
		w.conns[c] = true
		return c, nil
	}
}

// kill ends every connection for good, as SIGKILL does.
func (w *wire) kill() {
	w.thaw()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dead = true
	for c := range w.conns {
		_ = c.Conn.Close() // as the kernel does
	}
}

// cut ends about half of the connections.
func (w *wire) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := range w.conns {
		if w.random.IntN(2) == 0 {
			_ = c.Conn.Close()
		}
	}
}

// freeze makes the network of some servers silent until thaw, behind a read that waits already: nothing is
// lost, nothing arrives.
func (w *wire) freeze(silent sides) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dead {
		return
	}
	w.silent |= silent
	if w.frozen == nil {
		w.frozen = make(chan struct{})
	}
}

// slow delays what is sent, until thaw.
func (w *wire) slow(lag time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lag = lag
}

func (w *wire) thaw() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lag, w.silent = 0, 0
	if w.frozen != nil {
		close(w.frozen)
		w.frozen = nil
	}
}

// heal ends the faults of the wire that last.
func (w *wire) heal() {
	w.thaw()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unheard = 0
}

// cuts reports whether the connection ends behind what was just sent.
func (w *wire) cuts(sent []byte) bool {
	sent = bytes.ToLower(sent)
	if !slices.ContainsFunc(w.words, func(word string) bool { return bytes.Contains(sent, []byte(word)) }) {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.random.IntN(1000) < w.unheard
}

type conn struct {
	net.Conn

	wire        *wire
	side        sides
	mu          sync.Mutex
	read, write time.Time // deadlines
}

// lookEvery is how often a frozen connection looks whether its deadline has passed.
const lookEvery = 2 * time.Millisecond

// wait returns once the wire is not frozen, or at the deadline.
func (c *conn) wait(deadline *time.Time) (lag time.Duration, err error) {
	for {
		c.wire.mu.Lock()
		frozen, lag, silent := c.wire.frozen, c.wire.lag, c.wire.silent&c.side != 0
		c.wire.mu.Unlock()
		if !silent {
			return lag, nil
		}
		select {
		case <-frozen:
		case <-time.After(lookEvery):
		}
		c.mu.Lock()
		over := !deadline.IsZero() && time.Now().After(*deadline)
		c.mu.Unlock()
		if over {
			return 0, os.ErrDeadlineExceeded
		}
	}
}

func (c *conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *conn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	c.read = t
	c.mu.Unlock()
	return c.Conn.SetReadDeadline(t)
}

func (c *conn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	c.write = t
	c.mu.Unlock()
	return c.Conn.SetWriteDeadline(t)
}

func (c *conn) Read(b []byte) (int, error) {
	if _, err := c.wait(&c.read); err != nil {
		return 0, err
	}
	return c.Conn.Read(b)
}

func (c *conn) Write(b []byte) (int, error) {
	lag, err := c.wait(&c.write)
	if err != nil {
		return 0, err
	}
	if lag > 0 {
		<-time.After(lag)
	}
	n, err := c.Conn.Write(b)
	if err == nil && c.wire.cuts(b) {
		<-time.After(lookEvery) // the server may have heard it
		_ = c.Conn.Close()
	}
	return n, err
}

func (c *conn) Close() error {
	c.wire.mu.Lock()
	delete(c.wire.conns, c)
	c.wire.mu.Unlock()
	return c.Conn.Close()
}
