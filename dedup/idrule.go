package dedup

import (
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
	sources []IDSource
}

// IDSource is a header that may carry a message's ID. The first source of a rule that applies is
// used.
type IDSource struct {
	// Header is the name of the header. Its value is the ID.
	Header string
	// Proof is a prefix of header names. Header is used only if the same message has a header whose
	// name begins with it. Empty: no proof is needed.
	Proof string
}

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
	parts := []string{ruleStandard}
	for _, profile := range profiles {
		parts = append(parts, string(profile))
	}
	return ParseIDRule(strings.Join(parts, "+"))
}

// HeaderIDs returns the rule that reads the named headers in this order. At most 20 names of 1 to
// 255 visible ASCII characters without comma, 2048 bytes in all. Without names, no header is used
// and all messages get their IDs by other means.
func HeaderIDs(names ...string) (IDRule, error) {
	rule := IDRule{text: ruleHeaders + strings.Join(names, ","), sources: []IDSource{}}
	if len(names) > IDHeadersMax {
		return IDRule{}, fmt.Errorf("%w: %d headers: want at most %d", ErrIDRule, len(names), IDHeadersMax)
	}
	for _, name := range names {
		if !isHeaderName(name) {
			return IDRule{}, fmt.Errorf("%w: header %.300q: want 1 to %d visible ASCII characters without comma", ErrIDRule, name, IDHeaderBytesMax)
		}
		rule.sources = append(rule.sources, IDSource{Header: name})
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
	parts := strings.Split(text, "+")
	profiles := map[IDProfile]bool{}
	for _, part := range parts[1:] {
		profile := IDProfile(part)
		if profile != ProfileDebezium && profile != ProfileWatermill || profiles[profile] {
			return IDRule{}, fmt.Errorf("%w: profile %.100q: want %s or %s, each once", ErrIDRule, part, ProfileDebezium, ProfileWatermill)
		}
		profiles[profile] = true
	}
	if parts[0] != ruleStandard {
		return IDRule{}, fmt.Errorf("%w: %.100q: want standard, standard+debezium, standard+watermill or headers:NAME,NAME", ErrIDRule, text)
	}
	return standardIDs(profiles[ProfileDebezium], profiles[ProfileWatermill]), nil
}

// standardIDs wants a second header for the names that other programs use for other things, unless
// their producer is asserted.
func standardIDs(debezium, watermill bool) IDRule {
	rule := IDRule{text: ruleStandard, sources: []IDSource{{Header: headerMessageID}, {Header: headerCloudEvent}}}
	for _, known := range []struct {
		asserted bool
		profile  IDProfile
		source   IDSource
	}{
		{debezium, ProfileDebezium, IDSource{Header: headerDebezium, Proof: proofDebezium}},
		{watermill, ProfileWatermill, IDSource{Header: headerWatermill, Proof: proofWatermill}},
	} {
		if known.asserted {
			rule.text += "+" + string(known.profile)
			known.source.Proof = ""
		}
		rule.sources = append(rule.sources, known.source)
	}
	return rule
}

// String returns the text of the rule.
func (r IDRule) String() string {
	if r.text == "" {
		return ruleStandard
	}
	return r.text
}

// Sources returns the headers that carry a message's ID, in the order in which they are tried.
func (r IDRule) Sources() []IDSource {
	if r.text == "" {
		return standardIDs(false, false).sources
	}
	return slices.Clone(r.sources)
}

// SameIDs reports whether two rules give every message the same ID.
func (r IDRule) SameIDs(other IDRule) bool {
	return slices.Equal(r.Sources(), other.Sources())
}
