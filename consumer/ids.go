package consumer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/effectonce/effectonce/dedup"
)

// idRule returns the rule that Config asks for. The rule stored with the consumer's name is the one
// in effect.
func (c *Config) idRule() (rule dedup.IDRule, err error) {
	switch {
	case c.IDHeaders != nil && len(c.IDProfiles) > 0:
		err = errors.New("IDProfiles: want none together with IDHeaders")
	case c.IDHeaders != nil:
		if rule, err = dedup.HeaderIDs(c.IDHeaders...); err != nil {
			err = fmt.Errorf("IDHeaders: %w", err)
		}
	default:
		if rule, err = dedup.StandardIDs(c.IDProfiles...); err != nil {
			err = fmt.Errorf("IDProfiles: %w", err)
		}
	}
	return rule, err
}

// warnRule logs once per name that the stored rule derives other IDs than Config's rule.
func (c *Consumer) warnRule(ctx context.Context, name string, wanted, stored dedup.IDRule) {
	if stored.SameIDs(wanted) || c.warnedRules[name] {
		return
	}
	if c.warnedRules == nil {
		c.warnedRules = map[string]bool{}
	}
	c.warnedRules[name] = true
	quote := func(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }
	c.engine.cfg.Logger.WarnContext(ctx, "the stored ID rule stays in effect, not the one of Config: with another ID a redelivered message would have a second effect. To switch, stop all consumers of the name and run: "+
		"outbox-relay consumer id-rule "+quote(name)+" --set "+wantedText(wanted, quote)+" --why REASON", "group", c.engine.cfg.Group, "consumer", name, "stored", stored.String(), "wanted", wanted.String())
}

// wantedText formats a rule for the command line, quoted if a shell needs that.
func wantedText(wanted dedup.IDRule, quote func(string) string) string {
	if text := wanted.String(); strings.HasPrefix(text, "headers:") {
		return quote(text)
	}
	return wanted.String()
}

// reservedScope is the prefix of the scopes of IDs that the engine derives. A producer that could
// use such a scope could claim the ID of a future message.
const reservedScope = "effectonce:"

var (
	// errAmbiguousID: two headers of one name have different values. Choosing one of them could
	// drop a message as the duplicate of another.
	errAmbiguousID = errors.New("message carries two different values of an ID header: let its producer send one")

	errReservedSource = errors.New("ce_source begins with " + reservedScope + ", which is reserved: let its producer send another")
	errAskTimeout     = errors.New("Config.IDFunc or Hooks.WithoutID took longer than HandlerTimeout and was abandoned")
	errManyAsked      = errors.New("too many calls of Config.IDFunc, Hooks.WithoutID or handlers do not return: restart the process with functions that do")
	errAskGoexit      = errors.New("Config.IDFunc or Hooks.WithoutID ended its goroutine (runtime.Goexit)")
)

// identify sets the IDs of messages of one partition, and marks messages that must be parked.
func (c *Consumer) identify(l *lane, msgs []*Message) {
	var nameless []*Message
	for _, m := range msgs {
		if !c.identified(m, l.idSources) {
			nameless = append(nameless, m)
		}
	}
	c.ask(l, nameless)
}

// identified sets the ID of a message from its headers. It reports whether they have one.
func (c *Consumer) identified(m *Message, sources []dedup.IDSource) bool {
	if size := m.size(); size > c.engine.cfg.MessageBytesMax {
		m.refuse(reasonTooLarge, fmt.Errorf("message has %d bytes, MessageBytesMax is %d: it is parked without its payload and headers", size, c.engine.cfg.MessageBytesMax))
	}
	if len(m.Headers) > headersMax {
		m.refuse(reasonInvalid, fmt.Errorf("message has %d headers: want at most %d", len(m.Headers), headersMax))
		m.ID = coordinatesID(m)
		return true
	}
	raw, err := idHeader(m, sources)
	if err != nil {
		m.refuse(reasonInvalid, err)
	}
	if len(raw) == 0 {
		return false
	}
	m.name(raw)
	return true
}

// refuse marks a message to be parked. The first reason counts: a message that is too large is
// stored without its payload, whatever else is wrong with it.
func (m *Message) refuse(reason string, err error) {
	if m.park == nil {
		m.park = &parking{reason: reason, err: err}
	}
}

// name derives the ID from the raw ID of the message.
func (m *Message) name(raw []byte) {
	scope := m.Topic // a topic has no colon
	if source, ok := m.Header("ce_source"); ok && len(source) > 0 {
		scope = string(source)
	}
	if strings.HasPrefix(scope, reservedScope) {
		m.refuse(reasonInvalid, errReservedSource)
		m.ID = coordinatesID(m)
		return
	}
	m.ID = dedup.MessageID(scope, raw)
}

// idHeader returns the ID from the first header that has one. An empty value is not an ID: all
// messages with one would be duplicates of each other.
func idHeader(m *Message, sources []dedup.IDSource) ([]byte, error) {
	for _, source := range sources {
		found, err := oneValue(m, source.Header)
		if (err != nil || found != nil) && proven(m, source) {
			return found, err
		}
	}
	return nil, nil
}

func oneValue(m *Message, name string) (found []byte, err error) {
	for _, h := range m.Headers {
		if h.Name != name || len(h.Value) == 0 {
			continue
		}
		if found != nil && !bytes.Equal(found, h.Value) {
			return nil, fmt.Errorf("%w (header %q)", errAmbiguousID, name)
		}
		found = h.Value
	}
	return found, nil
}

// proven reports whether another header shows that the known producer wrote the message.
func proven(m *Message, source dedup.IDSource) bool {
	if source.Proof == "" {
		return true
	}
	for _, h := range m.Headers {
		if h.Name != source.Header && strings.HasPrefix(h.Name, source.Proof) {
			return true
		}
	}
	return false
}

// unidentified derives the ID of a message from its topic, partition and offset.
func (c *Consumer) unidentified(m *Message) {
	m.ID = coordinatesID(m)
	c.warnWithoutID.Do(func() {
		c.engine.cfg.Logger.Warn("messages without an ID are identified by topic, partition and offset: a duplicate that their producer sends is not recognised; logged once",
			"group", c.engine.cfg.Group, "topic", m.Topic, "partition", m.Partition, "offset", m.Offset, "id_rule", c.rules[m.Topic].String(), "not_counted", notCounted(m))
	})
}

// notCounted lists headers of the message that often carry an ID but are not in the rule of the
// topic.
func notCounted(m *Message) (names []string) {
	for _, name := range []string{"message-id", "ce_id", "id", "_watermill_message_uuid", "idempotency-key"} {
		if value, ok := m.Header(name); ok && len(value) > 0 {
			names = append(names, name)
		}
	}
	return names
}

// askTriesMax is how often a function may take too long for one message: a healthy message must not
// be parked because the process froze.
const askTriesMax = 3

// ask calls the functions of Config for messages without an ID header: IDFunc for an ID, then
// WithoutID. A message on which they panic or do not return is parked under its coordinates.
//
// When the lane stops, ask returns at once. Messages without an answer must not be handled, and are
// not: the lane begins no further transaction.
func (c *Consumer) ask(l *lane, msgs []*Message) {
	if c.engine.cfg.IDFunc == nil && c.engine.cfg.Hooks.WithoutID == nil {
		for _, m := range msgs {
			c.unidentified(m)
		}
		return
	}
	for tries := 0; len(msgs) > 0; {
		answers, err := c.answers(l, msgs)
		for i, given := range answers {
			switch m := msgs[i]; {
			case given.err != nil:
				m.unknowable(fmt.Errorf("Config.IDFunc or Hooks.WithoutID: %w", given.err))
			case len(given.raw) > 0:
				m.name(given.raw)
			default:
				c.unidentified(m)
			}
		}
		msgs = msgs[len(answers):]
		if tries++; len(answers) > 0 {
			tries = 1
		}
		switch {
		case err != nil && l.stopped():
			for _, m := range msgs {
				m.unknowable(err)
			}
			return
		case len(msgs) == 0, errors.Is(err, errAskTimeout) && tries < askTriesMax:
		default:
			msgs[0].unknowable(err)
			tries, msgs = 0, msgs[1:]
		}
	}
}

// unknowable parks a message for which the functions of Config failed.
func (m *Message) unknowable(err error) {
	m.ID = coordinatesID(m)
	m.refuse(reasonInvalid, err)
}

// answer is the result of the functions of Config for a message.
type answer struct {
	raw []byte
	err error
}

// asked is one goroutine that calls the functions of Config for one message after the other.
type asked struct {
	answers []answer
	n       atomic.Int64 // how many answers are complete
	state   atomic.Int32
	done    chan struct{}
}

// States of an asked. The first change decides: the goroutine ends it, or the watcher abandons it.
const (
	askedRunning int32 = iota
	askedEnded
	askedLeft
)

// answers gets the answers for messages, up to the first one without an answer; err is the reason.
func (c *Consumer) answers(l *lane, msgs []*Message) ([]answer, error) {
	a := &asked{answers: make([]answer, len(msgs)), done: make(chan struct{})}
	copies := make([]Message, len(msgs)) // an abandoned goroutine must not share memory with the handler
	for i, m := range msgs {
		copies[i] = *m
	}
	go func() {
		defer close(a.done)
		defer func() {
			if !a.state.CompareAndSwap(askedRunning, askedEnded) {
				c.engine.abandoned.Add(-1)
			}
		}()
		for i := range copies {
			a.answers[i] = c.answer(&copies[i])
			a.n.Store(int64(i) + 1)
			if a.state.Load() == askedLeft {
				return
			}
		}
	}()
	n, err := a.watch(l.ctx, c.engine.cfg.HandlerTimeout)
	if err != nil {
		l.leave(a)
	} else if n < len(msgs) {
		err = errAskGoexit
	}
	return a.answers[:n], err
}

// answer calls the functions of Config for one message.
func (c *Consumer) answer(m *Message) (given answer) {
	given.err = guard(func() error {
		// A message whose headers contradict each other is parked in any case.
		if c.engine.cfg.IDFunc != nil && (m.park == nil || m.park.reason != reasonInvalid) {
			given.raw = c.engine.cfg.IDFunc(m)
		}
		if len(given.raw) == 0 && c.engine.cfg.Hooks.WithoutID != nil {
			m.ID = coordinatesID(m)
			c.engine.cfg.Hooks.WithoutID(m)
		}
		return nil
	})
	return given
}

// watch waits until all answers are complete, or no answer was completed within limit. It returns
// how many answers count.
func (a *asked) watch(ctx context.Context, limit time.Duration) (n int, err error) {
	tick := time.NewTicker(limit)
	defer tick.Stop()
	for {
		select {
		case <-a.done:
			return int(a.n.Load()), nil
		case <-ctx.Done():
			return n, ctx.Err()
		case <-tick.C:
			now := int(a.n.Load())
			if now == n {
				return n, errAskTimeout
			}
			n = now
		}
	}
}

// leave abandons a goroutine, and waits while too many are abandoned.
func (l *lane) leave(a *asked) {
	l.engine.abandoned.Add(1)
	if !a.state.CompareAndSwap(askedRunning, askedLeft) {
		l.engine.abandoned.Add(-1)
		return
	}
	for int(l.engine.abandoned.Load()) >= l.engine.cfg.AbandonedMax && !l.stopped() {
		l.said.warn(l, "partition waits for functions of Config that do not return", errManyAsked)
		l.pause(time.Second)
	}
}
