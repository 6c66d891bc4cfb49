// Package fleet runs this program's own children as separate processes, and kills, freezes, resumes
// and restarts them. Children end with this process, however it ends: they watch their standard
// input ([ReadInput]), and on Linux the kernel kills them.
package fleet
