package bench

import "context"

// latencies measures milliseconds from the return of COMMIT until a poll returned the record, both
// in this process, for each message after the warm-up.
func (b *relayBench) latencies(ctx context.Context) error {
	b.note("publishing %d messages a second for %d seconds", latencyPerSecond, b.opts.LatencySeconds+int(streamWarmUp.Seconds()))
	topic, err := b.site.topic(ctx, "latency", b.opts.Partitions)
	if err != nil {
		return err
	}
	s := newStream(b.site, streamJob{
		Way: wayRelay, Topic: topic, Name: b.behind, Rate: latencyPerSecond, PerCommit: 1, Seconds: b.opts.LatencySeconds,
	}, b.progress)
	if err := s.run(ctx); err != nil {
		return err
	}
	b.samples["latency"] = s.milliseconds()
	return nil
}
