// Command dashboard checks that the queries of a Grafana dashboard are PromQL: promtool knows rules only.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/prometheus/prometheus/promql/parser"
)

func main() {
	text, err := os.ReadFile(os.Args[1])
	if err != nil {
		panic(err)
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		panic(err)
	}
	queries, wrong := 0, 0
	promql := parser.NewParser(parser.Options{})
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			queries++
			expr := strings.ReplaceAll(target.Expr, "$__rate_interval", "5m")
			if _, err := promql.ParseExpr(expr); err != nil {
				wrong++
				fmt.Printf("%s: %s: %v\n", panel.Title, target.Expr, err)
			}
		}
	}
	fmt.Printf("%s: %d queries, %d wrong\n", os.Args[1], queries, wrong)
	if queries == 0 || wrong > 0 {
		os.Exit(1)
	}
}
