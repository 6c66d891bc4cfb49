package monitor

import "time"

// StuckAfter makes a relay count as stuck sooner.
func StuckAfter(s *State, d time.Duration) { s.stuckAfter = d }
