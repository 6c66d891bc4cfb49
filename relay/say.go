package relay

import (
	"context"
	"log/slog"
	"time"

	"github.com/effectonce/effectonce/internal/say"
)

// sayings logs lasting conditions: each text once, and then every 30 s with the number of
// repetitions.
type sayings struct {
	logger *slog.Logger
	lines  say.Lines
}

// warn logs a problem. The attributes, such as an error or a shard, may differ each time.
func (s *sayings) warn(ctx context.Context, text string, attrs ...any) {
	if times, due := s.lines.Due(text, false); due {
		s.logger.WarnContext(ctx, text, append(attrs, "times", times)...)
	}
}

// about logs an error of one of several things with the same problem, such as topics.
func (s *sayings) about(ctx context.Context, thing, text string, attrs ...any) {
	if times, due := s.lines.Due(text+"\x00"+thing, false); due {
		s.logger.ErrorContext(ctx, text, append(attrs, "times", times)...)
	}
}

// over logs the end of a problem, if the problem was logged.
func (s *sayings) over(ctx context.Context, problem, text string, attrs ...any) {
	if ended, was := s.lines.End(problem); was {
		s.logger.InfoContext(ctx, text, append(attrs, "times", ended.Times, "lasted", ended.Lasted.Round(time.Millisecond))...)
	}
}
