package relay

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"

	"github.com/effectonce/effectonce/outbox"
)

// Routes decide to which Kafka topic (or, with a Sink, under which topic) a row goes. The zero
// value keeps the row's own topic.
//
// Operators always use the row's own topic name: for paused topics, the topic of dead rows,
// metrics and hooks. The order of a key is kept among rows of one topic in the outbox. Size limits,
// rights and whether a topic exists are those of the topic in Kafka.
//
// All replicas should have the same Routes, and so should programs that look for what was
// published. Rows that were published before a change stay where they are. After a crash, the last
// of them are published again according to the new rules.
type Routes struct {
	// Prefix goes before every name, including a name that a rule made. At most 200 letters,
	// digits, dots, underscores and hyphens.
	Prefix string
	// Rules in order, at most 100: the first match decides. A row that matches no rule keeps its
	// topic's name.
	Rules []Rule
}

// Rule applies to the rows that match both Topic and Header.
type Rule struct {
	// Topic is a regular expression (https://github.com/google/re2/wiki/Syntax) for the whole name
	// of the row's topic. Empty: all topics.
	Topic string
	// Header is the name of a header, and Value is a regular expression for its whole value. If the
	// row has several headers of that name, one match is enough; null is the empty text. Header
	// empty: the rule does not look at headers.
	Header, Value string
	// To is the new name; $1 and ${name} are what groups of Topic matched. Empty: the row keeps its
	// topic's name, and later rules do not apply to it.
	To string
	// Drop: the row is not published. It counts in Hooks.Dropped, and the log reports the number of
	// dropped rows. Drop cannot be combined with To, and needs Topic or Header.
	Drop bool
}

const (
	rulesMax       = 100
	ruleBytesMax   = 1000
	prefixBytesMax = 200
)

var (
	topicPart  = regexp.MustCompile(`^[a-zA-Z0-9._-]*$`)
	groupInTo  = regexp.MustCompile(`\$(?:\{(\w+)\}|(\w+))`)
	errNoRoute = errors.New("want letters, digits, dots, underscores and hyphens, at most 249 together with Prefix")
)

// Validate returns all problems at once. New calls it, too.
func (c Routes) Validate() error {
	var problems []error
	if len(c.Prefix) > prefixBytesMax || !topicPart.MatchString(c.Prefix) {
		problems = append(problems, fmt.Errorf("Routes.Prefix %.260q: want at most %d letters, digits, dots, underscores and hyphens", c.Prefix, prefixBytesMax))
	}
	if len(c.Rules) > rulesMax {
		problems = append(problems, fmt.Errorf("Routes.Rules has %d rules: want at most %d", len(c.Rules), rulesMax))
	}
	for i, rule := range c.Rules {
		for _, problem := range rule.validate(c.Prefix) {
			problems = append(problems, fmt.Errorf("Routes.Rules[%d]: %w", i, problem))
		}
	}
	return errors.Join(problems...)
}

func (r Rule) validate(prefix string) (problems []error) {
	report := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	for field, value := range map[string]string{"Topic": r.Topic, "Header": r.Header, "Value": r.Value, "To": r.To} {
		if len(value) > ruleBytesMax {
			report("%s has %d bytes: want at most %d", field, len(value), ruleBytesMax)
		}
	}
	topic, err := whole(r.Topic)
	if err != nil {
		report("Topic %.260q: %w", r.Topic, err)
	}
	if _, err := whole(r.Value); err != nil {
		report("Value %.260q: %w", r.Value, err)
	}
	switch {
	case r.Header == "" && r.Value != "":
		report("Value without Header: name the header whose value it is")
	case r.Drop && r.To != "":
		report("Drop and To %.260q: choose one of the two", r.To)
	case r.Drop && r.Topic == "" && r.Header == "":
		report("Drop of all rows: name a Topic or a Header, or to drop all rows use Topic \".*\"")
	}
	if topic == nil || r.To == "" {
		return problems
	}
	for _, group := range groupInTo.FindAllStringSubmatch(r.To, -1) {
		name := group[1] + group[2]
		if topic.SubexpIndex(name) < 0 && (len(name) > 3 || !isGroup(name, topic.NumSubexp())) {
			report("To %.260q: Topic %.260q has no group %q; write ${1} before letters and digits", r.To, r.Topic, name)
		}
	}
	if rest := groupInTo.ReplaceAllString(r.To, ""); !topicPart.MatchString(rest) || len(prefix)+len(rest) > 249 {
		report("To %.260q: %w", r.To, errNoRoute)
	}
	return problems
}

func isGroup(number string, groups int) bool {
	var n int
	_, err := fmt.Sscanf(number, "%d", &n)
	return err == nil && fmt.Sprint(n) == number && n <= groups
}

// whole compiles an expression that must match all of a text. Empty: it matches everything.
func whole(expression string) (*regexp.Regexp, error) {
	if expression == "" {
		return regexp.Compile(`(?s)^.*$`)
	}
	return regexp.Compile(`^(?:` + expression + `)$`)
}

// Router applies Routes as the relay does, for programs that compare the outbox with Kafka. It is
// safe for concurrent use.
type Router struct{ routes *routes }

// Router returns the Router of Routes, or the error of Validate.
func (c Routes) Router() (*Router, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	return &Router{newRoutes(c)}, nil
}

// Topic returns the Kafka topic of a row, by the row's topic and headers. dropped: the row goes to
// no topic.
func (r *Router) Topic(topic string, headers []outbox.Header) (name string, dropped bool) {
	return r.routes.of(topic, headers)
}

// Topics returns all Kafka topics that rows of a topic may go to.
func (r *Router) Topics(topic string) []string { return r.routes.names(topic) }

// routes are compiled Routes.
type routes struct {
	prefix string
	rules  []rule

	mu    sync.RWMutex
	known map[string]*route // by the row's topic
}

type rule struct {
	Rule
	topic, value *regexp.Regexp
}

// route holds the choices for the rows of a topic, in order; the last one has no condition.
type route struct {
	choices []choice
	names   []string // of the choices
}

type choice struct {
	header string
	value  *regexp.Regexp
	to     string
	drop   bool
}

// newRoutes returns nil if every row keeps its topic. The configuration was validated, or will be
// rejected.
func newRoutes(c Routes) *routes {
	if c.Prefix == "" && len(c.Rules) == 0 {
		return nil
	}
	r := &routes{prefix: c.Prefix, known: map[string]*route{}}
	for _, configured := range c.Rules {
		topic, err := whole(configured.Topic)
		value, valueErr := whole(configured.Value)
		if err == nil && valueErr == nil {
			r.rules = append(r.rules, rule{configured, topic, value})
		}
	}
	return r
}

// of returns the topic that a row goes to, or that it is dropped.
func (r *routes) of(topic string, headers []outbox.Header) (name string, drop bool) {
	if r == nil {
		return topic, false
	}
	for _, c := range r.route(topic).choices {
		if c.takes(headers) {
			return c.to, c.drop
		}
	}
	return r.prefix + topic, false
}

// names returns all topics that rows of a topic may go to.
func (r *routes) names(topic string) []string {
	if r == nil {
		return []string{topic}
	}
	return r.route(topic).names
}

func (r *routes) route(topic string) *route {
	r.mu.RLock()
	known := r.known[topic]
	r.mu.RUnlock()
	if known != nil {
		return known
	}
	known = r.choose(topic)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.known[topic] = known
	return known
}

// choose leaves out rules for other topics, and rules after the first one without another
// condition.
func (r *routes) choose(topic string) *route {
	found := &route{}
	add := func(c choice) {
		found.choices = append(found.choices, c)
		if !c.drop {
			found.names = append(found.names, c.to)
		}
	}
	for _, rule := range r.rules {
		match := rule.topic.FindStringSubmatchIndex(topic)
		if match == nil {
			continue
		}
		to := topic
		if rule.To != "" {
			to = string(rule.topic.ExpandString(nil, rule.To, topic, match))
		}
		add(choice{rule.Header, rule.value, r.prefix + to, rule.Drop})
		if rule.Header == "" {
			return found
		}
	}
	add(choice{to: r.prefix + topic})
	return found
}

func (c *choice) takes(headers []outbox.Header) bool {
	if c.header == "" {
		return true
	}
	for _, h := range headers {
		if h.Name == c.header && c.value.Match(h.Value) {
			return true
		}
	}
	return false
}

// ParseRule reads the command-line form: parts separated by semicolons, topic=REGEXP, header=NAME,
// value=REGEXP, and then to=NAME, drop or keep. A semicolon inside of an expression is written
// \x3b.
func ParseRule(text string) (Rule, error) {
	var r Rule
	verdicts := 0
	for part := range strings.SplitSeq(text, ";") {
		name, value, given := strings.Cut(strings.TrimSpace(part), "=")
		switch {
		case name == "topic" && given:
			r.Topic = value
		case name == "header" && given:
			r.Header = value
		case name == "value" && given:
			r.Value = value
		case name == "to" && value != "":
			r.To = value
			verdicts++
		case name == "drop" && !given:
			r.Drop = true
			verdicts++
		case name == "keep" && !given:
			verdicts++
		default:
			return r, fmt.Errorf("rule %.260q: %.100q: want topic=REGEXP, header=NAME, value=REGEXP, to=NAME, drop or keep, with semicolons between them", text, part)
		}
	}
	if verdicts != 1 {
		return r, fmt.Errorf("rule %.260q: want one of to=NAME, drop and keep", text)
	}
	return r, nil
}
