package main

import (
	"errors"
	"fmt"
	"strconv"
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

// addRates adds the flag of relay.Config.Rates.
func addRates(flags *pflag.FlagSet, rates *map[string]float64) {
	cli.AddText(flags, "rates", routesBytesMax, "rows per second by topic name in the outbox, as orders=100,bulk=2.5; other topics are not limited", func(text string) error {
		*rates = map[string]float64{}
		if strings.TrimSpace(text) == "" {
			return nil
		}
		for one := range strings.SplitSeq(text, ",") {
			topic, number, _ := strings.Cut(strings.TrimSpace(one), "=")
			rate, err := strconv.ParseFloat(number, 64)
			if err != nil || topic == "" || !(rate > 0 && rate <= 1_000_000) {
				return fmt.Errorf("%.300q: want topic=rows per second, above 0, at most 1000000", one)
			}
			if _, twice := (*rates)[topic]; twice {
				return fmt.Errorf("topic %.260q is given twice", topic)
			}
			(*rates)[topic] = rate
		}
		return nil
	})
}
