package main

import (
	"time"

	"github.com/spf13/pflag"
)

// backlogLimits on the outbox are only watched: "run" shows them as a metric, "doctor" as a warning.
type backlogLimits struct {
	age time.Duration
	mib int
}

func (l *backlogLimits) addFlags(flags *pflag.FlagSet) {
	addDuration(flags, &l.age, "backlog-age-max", 0, 0, 30*24*time.Hour, "how old the oldest row may be that is not published, before it is a warning; 0s: any age")
	addInt(flags, &l.mib, "backlog-mib-max", 0, 0, 1<<30, "how large the outbox may be on disk, in MiB, before it is a warning; 0: any size")
}

func (l *backlogLimits) bytes() int64 { return int64(l.mib) << 20 }
