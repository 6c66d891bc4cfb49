package main

import (
	"time"

	"github.com/spf13/pflag"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
)

// backlogLimits on the outbox change nothing: "run" reports them as a metric.
type backlogLimits struct {
	age time.Duration
	mib int
}

func (l *backlogLimits) addFlags(flags *pflag.FlagSet) {
	cli.AddDuration(flags, &l.age, "backlog-age-max", 0, 0, 30*24*time.Hour, "warn if the oldest unpublished row is older than this; 0s: never")
	cli.AddInt(flags, &l.mib, "backlog-mib-max", 0, 0, 1<<30, "warn if the outbox takes more MiB on disk than this; 0: never")
}

func (l *backlogLimits) bytes() int64 { return int64(l.mib) << 20 }
