// Package doctor checks the setup from the outside, without changing anything: what is wrong or soon will
// be ([Server], [Rights], [Topics] and the other checks, each a list of findings with a remedy). What
// the pipeline does is in package pipeline.
package doctor
