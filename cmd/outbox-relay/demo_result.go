//go:build !lean

package main

import (
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/demo"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// demoResult is the last line of "demo --json".
type demoResult struct {
	Orders              int      `json:"orders"`
	Delivered           int      `json:"delivered"`
	DuplicatesDelivered int      `json:"duplicates_delivered"`
	Effects             int      `json:"effects"`
	Lost                int      `json:"lost"`
	Doubled             int      `json:"doubled"`
	OutOfOrder          int      `json:"out_of_order"`
	Undelivered         int      `json:"undelivered"`
	Phantoms            int      `json:"phantoms"`
	WrongBalances       int      `json:"wrong_balances"`
	DuplicatesInjected  int      `json:"duplicates_injected"`
	Kills               int      `json:"kills"`
	Freezes             int      `json:"freezes"`
	Crashes             int      `json:"crashes"`
	Held                bool     `json:"held"`
	WithoutDedup        bool     `json:"without_dedup"`
	Seed                uint64   `json:"seed"`
	Seconds             float64  `json:"seconds"` // starting the servers included
	Postgres            string   `json:"postgres"`
	Kafka               string   `json:"kafka"`
	Examples            []string `json:"examples,omitempty"`
}

func newDemoResult(r demo.Report, postgres, kafka string, took time.Duration) demoResult {
	return demoResult{
		Orders: r.Orders, Delivered: r.Delivered, DuplicatesDelivered: r.DuplicatesDelivered, Effects: r.Effects,
		Lost: r.Lost, Doubled: r.Doubled, OutOfOrder: r.OutOfOrder,
		Undelivered: r.Undelivered, Phantoms: r.Phantoms, WrongBalances: r.WrongBalances,
		DuplicatesInjected: r.Injected, Kills: r.Kills, Freezes: r.Freezes, Crashes: r.Crashes,
		Held: r.Held(), Seed: r.Seed, Seconds: math.Round(took.Seconds()*10) / 10,
		Postgres: postgres, Kafka: kafka, Examples: r.Examples,
	}
}

func (r demoResult) print(out io.Writer) error {
	var text strings.Builder
	row := func(name string, n int) { terminal.Add(&text, "  %-48s %7d\n", name, n) }
	text.WriteString("\n")
	row("orders that the shop committed", r.Orders)
	row("orders delivered by Kafka", r.Delivered)
	row("duplicates that arrived", r.DuplicatesDelivered)
	row("effects", r.Effects)
	row("lost (orders without an effect)", r.Lost)
	row("doubled (effects beyond the first of an order)", r.Doubled)
	row("out of order", r.OutOfOrder)
	for _, rare := range []struct {
		name string
		n    int
	}{
		{"orders that never reached the topic", r.Undelivered},
		{"records and effects that belong to no order", r.Phantoms},
		{"customers with a wrong balance", r.WrongBalances},
		{"processes that ended by themselves", r.Crashes},
	} {
		if rare.n > 0 {
			row(rare.name, rare.n)
		}
	}
	row("processes killed (SIGKILL)", r.Kills)
	row("processes frozen and resumed", r.Freezes)
	text.WriteString("\n")
	for _, example := range r.Examples {
		terminal.Add(&text, "  %s\n", example)
	}
	terminal.Add(&text, "%.1f seconds, seed %d\n%s\n", r.Seconds, r.Seed, r.lastWord())
	_, err := io.WriteString(out, text.String())
	return err
}

func (r demoResult) lastWord() string {
	if r.Held {
		return fmt.Sprintf("The promise held: each of %d orders took effect exactly once and in order, through %d kills, %d freezes and %d duplicates.",
			r.Orders, r.Kills, r.Freezes, r.DuplicatesDelivered)
	}
	broken := fmt.Sprintf("The promise did NOT hold: %d lost, %d doubled, %d out of order.", r.Lost, r.Doubled, r.OutOfOrder)
	if r.WithoutDedup {
		broken += " The consumers ran without claims (--without-dedup): this is what claims prevent."
	}
	return broken
}
