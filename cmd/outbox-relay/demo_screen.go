//go:build !lean

package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/demo"
)

func (s *screen) progress(p demo.Progress) {
	if s.terminal == nil && p.Phase == s.phase && time.Since(s.last) < lineEvery {
		return
	}
	s.last, s.phase = time.Now(), p.Phase
	if s.terminal != nil {
		s.overwrite(p)
		return
	}
	text := fmt.Sprintf("%5.1fs  orders %d/%d  delivered %d  effects %d  duplicates %d  killed %d  frozen %d",
		p.Elapsed.Seconds(), p.Orders, p.Total, p.Delivered, p.Effects, p.Duplicates, p.Kills, p.Freezes)
	if len(p.Frozen) > 0 {
		text += " (now " + strings.Join(p.Frozen, ", ") + ")"
	}
	_ = say(s.out, "%s  %s\n", text, p.Phase)
}

func (s *screen) overwrite(p demo.Progress) {
	text := fmt.Sprintf("%.0fs orders %d delivered %d effects %d duplicates %d kills %d freezes %d",
		p.Elapsed.Seconds(), p.Orders, p.Delivered, p.Effects, p.Duplicates, p.Kills, p.Freezes)
	s.overwriteText(text)
}
