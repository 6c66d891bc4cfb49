//go:build !lean

package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/demo"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// demoScreen shows the progress of the demo.
type demoScreen struct {
	*terminal.Screen
	last  time.Time
	phase string
}

func (s *demoScreen) progress(p demo.Progress) {
	if s.Overwrites() {
		s.Overwrite(fmt.Sprintf("%.0fs orders %d delivered %d effects %d duplicates %d kills %d freezes %d",
			p.Elapsed.Seconds(), p.Orders, p.Delivered, p.Effects, p.Duplicates, p.Kills, p.Freezes))
		return
	}
	if p.Phase == s.phase && time.Since(s.last) < terminal.LineEvery {
		return
	}
	s.last, s.phase = time.Now(), p.Phase
	text := fmt.Sprintf("%5.1fs  orders %d/%d  delivered %d  effects %d  duplicates %d  killed %d  frozen %d",
		p.Elapsed.Seconds(), p.Orders, p.Total, p.Delivered, p.Effects, p.Duplicates, p.Kills, p.Freezes)
	if len(p.Frozen) > 0 {
		text += " (now " + strings.Join(p.Frozen, ", ") + ")"
	}
	s.Line(text + "  " + p.Phase)
}
