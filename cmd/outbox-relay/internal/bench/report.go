package bench

import (
	"fmt"
	"io"
	"math"
	"text/tabwriter"
	"time"
)

// Where is what a benchmark ran on and how long it took.
type Where struct {
	Postgres string  `json:"postgres,omitempty"`
	Kafka    string  `json:"kafka,omitempty"`
	Seconds  float64 `json:"seconds,omitempty"` // including the start of the servers
	// Notes are the reasons why the figures mean little, if there are any.
	Notes []string `json:"notes,omitempty"`
}

// tooSmall adds a note if something is measured with too little input for its figures to mean
// something.
func (w *Where) tooSmall(what string, have, telling, rounds int) {
	switch {
	case have < telling:
		w.Notes = append(w.Notes, fmt.Sprintf("%d %s are too few: rates and ratios of such a run are noise; use --%s %d or more", have, what, what, telling))
	case rounds < RoundsDefault:
		w.Notes = append(w.Notes, fmt.Sprintf("--rounds %d is too few for medians: use %d or more", rounds, RoundsDefault))
	}
}

func (w *Where) writeNotes(t *table) {
	for _, note := range w.Notes {
		t.line("note: %s", note)
	}
}

// SetServers adds descriptions of the servers.
func (w *Where) SetServers(postgres, kafka string, took time.Duration) {
	w.Postgres, w.Kafka, w.Seconds = postgres, kafka, math.Round(took.Seconds()*10)/10
}

// ConsumeReport is the result of Consume: messages per second, medians of the rounds.
type ConsumeReport struct {
	// One message per transaction, sequentially
	Textbook         *float64 `json:"textbook,omitempty" row:"textbook: one message per transaction"`
	TextbookParallel *float64 `json:"textbook_parallel,omitempty" row:"textbook, a goroutine for each partition"`
	// The same transaction in Watermill's router
	Watermill *float64 `json:"watermill,omitempty" row:"Watermill, the textbook's transaction"`
	Statement *float64 `json:"statement,omitempty" row:"engine, one statement per message"`
	// The effects of a batch in one round trip
	ByID    *float64 `json:"by_id,omitempty" row:"engine, statements queued"`
	NoDedup *float64 `json:"no_dedup,omitempty" row:"engine, queued, without dedup"`
	// Every message was claimed before
	AllDuplicates *float64 `json:"all_duplicates,omitempty" row:"engine, queued, all duplicates"`
	ParkedKey     *float64 `json:"parked_key,omitempty" row:"engine, queued, a key is held"`
	// No row for a message
	ByPosition *float64 `json:"by_position,omitempty" row:"engine, queued, by position"`
	BatchCopy  *float64 `json:"batch_copy,omitempty" row:"engine, whole batches by COPY"`
	HandLoop   *float64 `json:"hand_loop,omitempty" row:"the engine's statements by hand"`

	StatementVsTextbook    *float64 `json:"statement_vs_textbook,omitempty" ratio:"statement/textbook"`
	ByIDVsTextbook         *float64 `json:"by_id_vs_textbook,omitempty" ratio:"by_id/textbook"`
	ByIDVsTextbookParallel *float64 `json:"by_id_vs_textbook_parallel,omitempty" ratio:"by_id/textbook_parallel" fact:"queued against a goroutine for each partition" as:"%.1f"`
	ByIDVsWatermill        *float64 `json:"by_id_vs_watermill,omitempty" ratio:"by_id/watermill" fact:"queued against Watermill" as:"%.1f"`
	ByIDVsHandLoop         *float64 `json:"by_id_vs_hand_loop,omitempty" ratio:"by_id/hand_loop" fact:"queued against the loop by hand" as:"%.2f"`
	ByPositionVsNoDedup    *float64 `json:"by_position_vs_no_dedup,omitempty" ratio:"by_position/no_dedup" fact:"by position against without dedup" as:"%.2f"`
	ByIDVsNoDedup          *float64 `json:"by_id_vs_no_dedup,omitempty" ratio:"by_id/no_dedup" fact:"with dedup against without" as:"%.2f"`
	ParkedKeyVsByID        *float64 `json:"parked_key_vs_by_id,omitempty" ratio:"parked_key/by_id"`
	AllDuplicatesVsByID    *float64 `json:"all_duplicates_vs_by_id,omitempty" ratio:"all_duplicates/by_id"`

	// What a claim takes: table and index, and write-ahead log, for one stream of messages, and for
	// all partitions at the same time.
	BytesPerMessage               *float64 `json:"bytes_per_message,omitempty" fact:"claim, table and index, one stream" as:"%.0f bytes a message"`
	WALBytesPerMessage            *float64 `json:"wal_bytes_per_message,omitempty" fact:"claim, write-ahead log, one stream" as:"%.0f bytes a message"`
	BytesPerMessageInterleaved    *float64 `json:"bytes_per_message_interleaved,omitempty" fact:"claim, table and index, all partitions" as:"%.0f bytes a message"`
	WALBytesPerMessageInterleaved *float64 `json:"wal_bytes_per_message_interleaved,omitempty" fact:"claim, write-ahead log, all partitions" as:"%.0f bytes a message"`

	// The times on which the ratios depend: the textbook pays four round trips and a commit for
	// each message.
	RoundTrip *float64 `json:"round_trip_us,omitempty" fact:"this machine: a round trip to the database" as:"%.0f microseconds"`
	Commit    *float64 `json:"commit_us,omitempty" fact:"this machine: a commit" as:"%.0f microseconds"`

	Messages   int `json:"messages"`
	Partitions int `json:"partitions"`
	Rounds     int `json:"rounds"`

	Where
}

func newConsumeReport(opts ConsumeOptions, s samples) *ConsumeReport {
	r := &ConsumeReport{Messages: opts.Messages, Partitions: opts.Partitions, Rounds: opts.Rounds}
	fill(r, s)
	r.tooSmall("messages", opts.Messages, messagesTelling, opts.Rounds)
	return r
}

// WriteTable writes the report for people.
func (r *ConsumeReport) WriteTable(w io.Writer) error {
	t := newTable(w, "handler", "messages/s", "against the textbook")
	t.figures(r)
	r.writeNotes(t)
	return t.flush()
}

// table formats figures in columns and leaves out what was not measured.
type table struct {
	w   *tabwriter.Writer
	err error
}

func newTable(w io.Writer, columns ...any) *table {
	t := &table{w: tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
	t.line("%s\t%s\t%s", columns...)
	return t
}

func (t *table) line(format string, args ...any) {
	if _, err := fmt.Fprintf(t.w, format+"\n", args...); err != nil && t.err == nil {
		t.err = err
	}
}

func (t *table) row(what string, rate, against *float64) {
	if rate != nil && against != nil {
		t.line("%s\t%10.0f\t%19.1fx", what, *rate, *against)
	}
}

func (t *table) fact(what string, value *float64, format string) {
	if value != nil {
		t.line("%s\t"+format, what, *value)
	}
}

func (t *table) flush() error {
	if t.err != nil {
		return t.err
	}
	return t.w.Flush()
}

// rounded removes digits that mean nothing.
func rounded(value *float64, digits int) *float64 {
	if value == nil {
		return nil
	}
	unit := math.Pow10(digits)
	r := math.Round(*value*unit) / unit
	return &r
}

func ratio(a, b *float64) *float64 {
	if a == nil || b == nil || *b == 0 {
		return nil
	}
	r := *a / *b
	return rounded(&r, 2)
}
