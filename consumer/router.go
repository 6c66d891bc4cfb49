package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/effectonce/effectonce/dedup"
)

// Routes are the handlers of messages, by topic.
type Routes map[string]TopicRoutes

// TopicRoutes are the handlers of a topic's messages. At least one of the two fields must be set.
type TopicRoutes struct {
	// Types are handlers by the type of message that a header names; see Route.
	Types map[string]Handler
	// Default gets every message whose type is not in Types, and messages without a type. If it is
	// nil, they are parked as unknown_type, or treated according to Config.OnFailure. One that only
	// returns nil skips them: they count as handled, and a handler that is deployed later never sees
	// them.
	Default Handler
}

// Router is a Handler that passes each message to the handler of its topic and type. Create one
// with Route.
type Router struct {
	topics map[string]topicRoutes
	rule   dedup.IDRule // of the headers that may carry the type
}

// route is the destination of messages. Routes are compared by address: handlers cannot be
// compared.
type route struct{ handler Handler }

type topicRoutes struct {
	types     map[string]*route
	otherwise *route // nil: a message with no type in types is unknown
}

// Route returns a router, or all problems of its routes and configuration at once. typeHeaders are the
// names of the headers that may carry the type of a message; the first one that is present and not empty
// counts. Default: ce_type (CloudEvents), type. The handlers may be of any kind, including routers. Consecutive messages of one route reach its handler together,
// up to Config.BatchMax. The order of messages is kept across routes. A message of a topic that has
// no routes, or with different types in one header, is always parked.
func Route(routes Routes, typeHeaders ...string) (*Router, error) {
	var problems []error
	report := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if typeHeaders == nil {
		typeHeaders = []string{"ce_type", "type"}
	}
	rule, err := dedup.HeaderIDs(typeHeaders...)
	if err != nil {
		report("typeHeaders: %s", strings.TrimPrefix(err.Error(), dedup.ErrIDRule.Error()+": "))
	}
	if len(routes) == 0 {
		report("routes are empty: want at least one topic")
	}
	topics := make(map[string]topicRoutes, len(routes))
	for _, topic := range slices.Sorted(maps.Keys(routes)) {
		given, made := routes[topic], topicRoutes{types: map[string]*route{}}
		if !topicName.MatchString(topic) {
			report("topic %.260q: want 1 to 249 letters, digits, dots, underscores and hyphens", topic)
		}
		if len(given.Types) == 0 && given.Default == nil {
			report("topic %.260q: want Types or Default", topic)
		}
		if given.Default != nil {
			made.otherwise = &route{given.Default}
		}
		for _, name := range slices.Sorted(maps.Keys(given.Types)) {
			made.types[name] = &route{given.Types[name]}
			if name == "" {
				report("topic %.260q: a type is empty: messages without a type go to Default", topic)
			}
			if given.Types[name] == nil {
				report("topic %.260q, type %.260q: handler is nil", topic, name)
			}
		}
		topics[topic] = made
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	return &Router{topics, rule}, nil
}

// Topics returns the topics that have routes, sorted, for Config.Topics.
func (r *Router) Topics() []string { return slices.Sorted(maps.Keys(r.topics)) }

func (r *Router) routes(topic string) bool {
	_, ok := r.topics[topic]
	return ok
}

// handle passes runs of messages with the same route to their handlers. It looks up all routes
// first: a message without a route fails before any work that would have to be rolled back.
func (r *Router) handle(ctx context.Context, t *tx, msgs []*Message) error {
	routes := make([]*route, len(msgs))
	for i, msg := range msgs {
		var err error
		if routes[i], err = r.find(msg); err != nil {
			return &messageError{msg, err}
		}
	}
	for begin := 0; begin < len(msgs); {
		end := begin + 1
		for end < len(msgs) && routes[end] == routes[begin] {
			end++
		}
		if err := routes[begin].handler.handle(ctx, t, msgs[begin:end]); err != nil {
			return err
		}
		begin = end
	}
	return nil
}

// find returns the route of a message.
func (r *Router) find(msg *Message) (*route, error) {
	topic, ok := r.topics[msg.Topic]
	if !ok {
		topic, ok = r.topics[msg.alias]
	}
	if !ok {
		return nil, unknownType("topic %q has no routes", msg.Topic)
	}
	if len(topic.types) == 0 {
		return topic.otherwise, nil
	}
	name, err := dedup.ReadID(r.rule, msg.Headers, headerParts)
	if err != nil {
		return nil, unknownType("its type: %w", err)
	}
	if found, ok := topic.types[string(name)]; ok {
		return found, nil
	}
	switch {
	case topic.otherwise != nil:
		return topic.otherwise, nil
	case name == nil:
		return nil, unknownType("message has no type in %s", r.rule)
	default:
		return nil, unknownType("type %.260q has no route in topic %q", name, msg.Topic)
	}
}

func unknownType(format string, args ...any) error {
	return &permanentError{reasonUnknownType, fmt.Errorf(format, args...)}
}
