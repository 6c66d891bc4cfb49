// Package nodedup names the dedup level that takes the claim out of a consumer. It is internal: the demo
// uses it to show what happens without the claim, and the benchmark to measure what the claim costs.
package nodedup

// Level is a value of consumer.Dedup.
const Level = 255
