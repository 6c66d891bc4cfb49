package main

import (
	"errors"
	"strings"

	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
	"github.com/effectonce/effectonce/relay"
)

const routesBytesMax = 20_000

// addRoutes adds the flags of relay.Routes.
func addRoutes(flags *pflag.FlagSet, routes *relay.Routes) {
	cli.AddText(flags, "topic-prefix", 200, "prefix of every topic's name in Kafka", func(text string) error {
		routes.Prefix = text
		return relay.Routes{Prefix: text}.Validate()
	})
	cli.AddText(flags, "routes", routesBytesMax,
		"rules separated by ;; (the first match decides): topic=REGEXP;header=NAME;value=REGEXP, then to=NAME, drop or keep", func(text string) error {
			rules, err := parseRoutes(text)
			routes.Rules = rules
			return errors.Join(err, relay.Routes{Rules: rules}.Validate())
		})
}

func parseRoutes(text string) (rules []relay.Rule, err error) {
	if strings.TrimSpace(text) == "" {
		return nil, nil
	}
	for one := range strings.SplitSeq(text, ";;") {
		rule, problem := relay.ParseRule(one)
		rules, err = append(rules, rule), errors.Join(err, problem)
	}
	return rules, err
}
