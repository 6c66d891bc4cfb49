package consumer

import (
	"context"
	"errors"
	"fmt"
	"strings"

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

// warnRule logs that the stored rule derives other IDs than Config's rule.
func (c *Consumer) warnRule(ctx context.Context, name string, wanted, stored dedup.IDRule) {
	if stored.SameIDs(wanted) {
		return
	}
	quote := func(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }
	c.cfg.Logger.WarnContext(ctx, "the stored ID rule stays in effect, not the one of Config: with another ID a redelivered message would have a second effect. To switch, stop all consumers of the name and run: "+
		"outbox-relay consumer id-rule "+quote(name)+" --set "+quote(wanted.String())+" --why REASON", "group", c.cfg.Group, "consumer", name, "stored", stored.String(), "wanted", wanted.String())
}

// reservedScope is the prefix of the scopes of IDs that the engine derives. A producer that could
// use such a scope could claim the ID of a future message.
const reservedScope = "effectonce:"

var errReservedSource = errors.New("ce_source begins with " + reservedScope + ", which is reserved: let its producer send another")

// identify sets the ID of a message from its headers. A message without one keeps no ID if
// Config.IDFunc is to be asked: see askIDs. It marks messages that must be parked.
func (c *Consumer) identify(m *Message, rule dedup.IDRule) {
	if size := m.size(); size > c.cfg.MessageBytesMax {
		m.refuse(reasonTooLarge, fmt.Errorf("message has %d bytes, MessageBytesMax is %d: it is parked without its payload and headers", size, c.cfg.MessageBytesMax))
	}
	if len(m.Headers) > headersMax {
		m.unknowable(fmt.Errorf("message has %d headers: want at most %d", len(m.Headers), headersMax))
		return
	}
	for _, h := range m.Headers {
		if !isText(h.Name) {
			m.unknowable(fmt.Errorf("the name of header %.60q is not UTF-8, or has a NUL: it is parked without that header; let its producer send another name", h.Name))
			return
		}
	}
	raw, err := dedup.ReadID(rule, m.Headers, headerParts)
	switch {
	case err != nil:
		m.unknowable(err)
	case len(raw) > 0:
		m.name(raw)
	case c.cfg.IDFunc == nil:
		m.name(nil)
	}
}

// askIDs asks Config.IDFunc for the IDs of messages without one, under the limits of a handler. A
// message on which it panics is parked.
func (c *Consumer) askIDs(ctx context.Context, t *tx, msgs []*Message) *failure {
	for _, m := range msgs {
		if m.named {
			continue
		}
		given, raw := *m, []byte(nil) // the function may still use it when m is handled, by others: they see turn
		t.turn(m)
		err := guard(func() error { raw = c.cfg.IDFunc(&given); return nil })
		if ctx.Err() != nil || !t.own(func() {
			if err != nil {
				m.unknowable(fmt.Errorf("Config.IDFunc: %w", err))
			} else {
				m.name(raw)
			}
		}) {
			return &failure{origin: originHandler, msg: m, err: context.Cause(ctx)}
		}
	}
	t.since.Store(0)
	return nil
}

// refuse marks a message to be parked. The first reason counts: a message that is too large is
// stored without its payload, whatever else is wrong with it.
func (m *Message) refuse(reason string, err error) {
	if m.park == nil {
		m.park = &parking{reason: reason, err: err}
	}
}

// name derives the ID from the raw ID of the message; empty: from its coordinates.
func (m *Message) name(raw []byte) {
	m.named = true
	if len(raw) == 0 {
		m.plain, m.ID = true, coordinatesID(m)
		return
	}
	scope := m.alias // a topic has no colon
	if source, ok := m.Header("ce_source"); ok && len(source) > 0 {
		scope = string(source)
	}
	if strings.HasPrefix(scope, reservedScope) {
		m.unknowable(errReservedSource)
		return
	}
	m.ID = dedup.MessageID(scope, raw)
}

// unknowable parks a message whose ID cannot be known.
func (m *Message) unknowable(err error) {
	m.named, m.ID = true, coordinatesID(m)
	m.refuse(reasonInvalid, err)
}
