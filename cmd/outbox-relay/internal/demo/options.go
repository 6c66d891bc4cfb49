package demo

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

// Bounds and defaults of Options.
const (
	OrdersMin       = 50
	OrdersDefault   = 3000
	OrdersMax       = 100_000
	DurationMin     = 5 * time.Second
	DurationDefault = 20 * time.Second
	DurationMax     = 10 * time.Minute
	SessionMin      = 2 * time.Second
	SessionDefault  = 6 * time.Second
	SessionMax      = time.Minute
	// OrdersPerSecondMax is the rate that the shop achieves beside everything else on two cores.
	OrdersPerSecondMax = 500
)

// Options are the options of Run. Command, DatabaseURL and Brokers have no default.
type Options struct {
	// Command starts a child: program and arguments. It has to call RunProcess.
	Command []string
	// DatabaseURL is the URL of the PostgreSQL database. Children receive it through a pipe, never
	// as an argument or in their environment, where other users of the machine could read its
	// password.
	DatabaseURL string
	// Brokers are the seed brokers of the Kafka cluster.
	Brokers []string
	// Orders is how many orders the shop places. 50 to 100,000 and at most 500 for each second of
	// Duration; default 3,000.
	Orders int
	// Duration is how long the shop takes for them, and how long processes are killed and frozen.
	// 5 s to 10 min; default 20 s.
	Duration time.Duration
	// Fake means that the brokers are kfake, which can keep a dead member in a group; see nudge.
	Fake bool
	// Session is Kafka's session timeout for the consumers: how long the group waits for a member
	// that was killed or is frozen. 2 s to 1 min, and not below the brokers' minimum, which is 6 s
	// unless configured; default 6 s.
	Session time.Duration
	// Seed determines which orders are placed, and what is killed, frozen and duplicated when. The
	// effect on the processes depends on the machine, so two runs of one seed are similar, not
	// identical.
	Seed uint64
	// WithoutDedup removes the claim from the consumers, to show that the checker detects the
	// difference.
	WithoutDedup bool
	// Progress is called a few times a second, from one goroutine. Default: none.
	Progress func(Progress)
}

// Progress is the progress of a run.
type Progress struct {
	Elapsed    time.Duration
	Phase      string // the current phase
	Total      int    // orders that the shop has to place
	Orders     int    // orders that it has committed
	Delivered  int    // different messages in the topic
	Effects    int    // orders that have an effect
	Duplicates int    // records that were published again on purpose
	Kills      int
	Freezes    int
	Frozen     []string // processes that are frozen now
}

// Check returns everything that is wrong with the numbers; zero means the default.
func (o Options) Check() error {
	orders, duration, session := cmp.Or(o.Orders, OrdersDefault), cmp.Or(o.Duration, DurationDefault), cmp.Or(o.Session, SessionDefault)
	var problems []error
	if orders < OrdersMin || orders > OrdersMax {
		problems = append(problems, fmt.Errorf("orders %d: want %d to %d", orders, OrdersMin, OrdersMax))
	}
	if duration < DurationMin || duration > DurationMax {
		problems = append(problems, fmt.Errorf("duration %v: want %v to %v", duration, DurationMin, DurationMax))
	}
	if session < SessionMin || session > SessionMax {
		problems = append(problems, fmt.Errorf("session %v: want %v to %v", session, SessionMin, SessionMax))
	}
	if rate := float64(orders) / duration.Seconds(); len(problems) == 0 && rate > OrdersPerSecondMax {
		problems = append(problems, fmt.Errorf("%d orders in %v are %.0f a second: want at most %d: use a longer duration or fewer orders",
			orders, duration, rate, OrdersPerSecondMax))
	}
	return errors.Join(problems...)
}

// withDefaults sets defaults and returns all problems at once.
func (o Options) withDefaults() (Options, error) {
	err := o.Check()
	if len(o.Command) == 0 || o.DatabaseURL == "" || len(o.Brokers) == 0 {
		err = errors.Join(err, errors.New("demo: Command, DatabaseURL and Brokers are required"))
	}
	o.Orders = cmp.Or(o.Orders, OrdersDefault)
	o.Duration = cmp.Or(o.Duration, DurationDefault)
	o.Session = cmp.Or(o.Session, SessionDefault)
	if o.Progress == nil {
		o.Progress = func(Progress) {}
	}
	return o, err
}
