package dedup

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// IDRule defines which headers of a message carry its ID. It is stored with each consumer name: a
// message that got another ID than before would be handled again. The zero value is the standard
// rule.
//
// Its text, as ParseIDRule reads it and String writes it:
//
//	standard             message-id; ce_id; Debezium's and Watermill's names if a second header proves them
//	standard+debezium    the same, and the operator vouches that "id" comes from Debezium's outbox event router
//	standard+watermill   the same, and the operator vouches that _watermill_message_uuid comes from Watermill
//	headers:a,b          the first of these headers that is present and not empty; "headers:" for none
//
// Profiles can be combined: standard+debezium+watermill.
type IDRule struct {
	text    string
	sources []idSource
}

// idSource is a header that may carry a message's ID: only if the same message has another header whose name
// begins with proof. Empty: no proof is needed.
type idSource struct{ header, proof string }

// IDProfile vouches for the producer of a topic: it wrote the header that its messages carry.
type IDProfile string

// The profiles.
const (
	// ProfileDebezium: the header "id" is written by Debezium's outbox event router.
	ProfileDebezium IDProfile = "debezium"
	// ProfileWatermill: the header "_watermill_message_uuid" is written by a Watermill publisher.
	ProfileWatermill IDProfile = "watermill"
)

// Bounds of an IDRule.
const (
	IDHeadersMax     = 20
	IDHeaderBytesMax = 255
	IDRuleBytesMax   = 2048 // of its text
)

const (
	ruleStandard = "standard"
	ruleHeaders  = "headers:"
)

// Headers that carry a message's ID.
const (
	headerMessageID  = "message-id" // written by the relay of this module
	headerCloudEvent = "ce_id"      // CloudEvents
	headerDebezium   = "id"
	headerWatermill  = "_watermill_message_uuid"
)

// Headers that prove a producer. Debezium writes __debezium.context.connectorName and others.
// Watermill's components write _watermill_delayed_until, _watermill_requeuer_retries and others.
// Watermill's publisher for Kafka writes only the UUID and what the program set, so most of its
// topics need the profile.
const (
	proofDebezium  = "__debezium."
	proofWatermill = "_watermill_"
)

// ErrIDRule is returned by ParseIDRule for an invalid rule, and by Register if the stored rule is
// invalid: a later release wrote it. Nothing was changed. Remedy: use the later release.
var ErrIDRule = errors.New("invalid ID rule")

// StandardIDs returns the standard rule with profiles.
func StandardIDs(profiles ...IDProfile) (IDRule, error) {
	text := ruleStandard
	for _, profile := range profiles {
		text += "+" + string(profile)
	}
	return ParseIDRule(text)
}

// HeaderIDs returns the rule that reads the named headers in this order. At most 20 names of 1 to
// 255 visible ASCII characters without comma, 2048 bytes in all. Without names, no header is used
// and all messages get their IDs by other means.
func HeaderIDs(names ...string) (IDRule, error) {
	rule := IDRule{text: ruleHeaders + strings.Join(names, ","), sources: []idSource{}}
	if len(names) > IDHeadersMax {
		return IDRule{}, fmt.Errorf("%w: %d headers: want at most %d", ErrIDRule, len(names), IDHeadersMax)
	}
	for _, name := range names {
		if !isHeaderName(name) {
			return IDRule{}, fmt.Errorf("%w: header %.300q: want 1 to %d visible ASCII characters without comma", ErrIDRule, name, IDHeaderBytesMax)
		}
		rule.sources = append(rule.sources, idSource{header: name})
	}
	if len(rule.text) > IDRuleBytesMax {
		return IDRule{}, fmt.Errorf("%w: %d bytes: want at most %d", ErrIDRule, len(rule.text), IDRuleBytesMax)
	}
	return rule, nil
}

func isHeaderName(name string) bool {
	return len(name) >= 1 && len(name) <= IDHeaderBytesMax &&
		!strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' || r == ',' })
}

// ParseIDRule reads the text of a rule.
func ParseIDRule(text string) (IDRule, error) {
	if len(text) > IDRuleBytesMax {
		return IDRule{}, fmt.Errorf("%w: %d bytes: want at most %d", ErrIDRule, len(text), IDRuleBytesMax)
	}
	if names, ok := strings.CutPrefix(text, ruleHeaders); ok {
		if names == "" {
			return HeaderIDs()
		}
		return HeaderIDs(strings.Split(names, ",")...)
	}
	profiles := strings.Split(text, "+")
	if profiles[0] != ruleStandard {
		return IDRule{}, fmt.Errorf("%w: %.100q: want standard, standard+debezium, standard+watermill or headers:NAME,NAME", ErrIDRule, text)
	}
	// The names that other programs use for other things need a second header, unless the operator
	// vouches for their producer.
	debezium, watermill := idSource{headerDebezium, proofDebezium}, idSource{headerWatermill, proofWatermill}
	for _, profile := range profiles[1:] {
		switch {
		case IDProfile(profile) == ProfileDebezium && debezium.proof != "":
			debezium.proof = ""
		case IDProfile(profile) == ProfileWatermill && watermill.proof != "":
			watermill.proof = ""
		default:
			return IDRule{}, fmt.Errorf("%w: profile %.100q: want %s or %s, each once", ErrIDRule, profile, ProfileDebezium, ProfileWatermill)
		}
	}
	slices.Sort(profiles[1:]) // one rule has one text
	return IDRule{text: strings.Join(profiles, "+"), sources: []idSource{{header: headerMessageID}, {header: headerCloudEvent}, debezium, watermill}}, nil
}

// String returns the text of the rule.
func (r IDRule) String() string {
	if r.text == "" {
		return ruleStandard
	}
	return r.text
}

// None reports whether the rule reads no header.
func (r IDRule) None() bool { return r.text == ruleHeaders }

// SameIDs reports whether two rules give every message the same ID.
func (r IDRule) SameIDs(other IDRule) bool { return r.String() == other.String() }

// ReadID returns what a message carries as its ID in its headers, which read splits; nil: nothing. The first
// header of the rule that has a value counts. An empty value is no ID: all messages with one would be
// duplicates of each other. Two different values of one header are an error: choosing one could take a message
// for another.
func ReadID[H any](r IDRule, headers []H, read func(H) (name string, value []byte)) (id []byte, err error) {
	if r.text == "" {
		r, _ = StandardIDs()
	}
	for _, source := range r.sources {
		proven := source.proof == ""
		id = nil
		for _, h := range headers {
			name, value := read(h)
			switch {
			case name != source.header:
				proven = proven || strings.HasPrefix(name, source.proof)
			case len(value) == 0:
			case id != nil && !bytes.Equal(id, value):
				err = fmt.Errorf("message carries two different values of header %q: let its producer send one", name)
			default:
				id = value
			}
		}
		if id != nil && proven {
			return id, err
		}
		err = nil
	}
	return nil, nil
}
