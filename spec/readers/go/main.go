// Command df11go opens, verifies and restores df11 containers.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"

	"df11go/df11"
)

const usage = `usage:
  df11go open FILE
  df11go verify [-folder DIR] FILE...
  df11go restore [-folder DIR] FILE... OUT
  df11go vectors DIR

Several FILEs are shards of one model. DIR of verify and restore holds the side
files that lie beside the containers. Exit codes: 0 good, 1 wrong, 2 something
could not be checked, 3 anything else.
`

func main() {
	if len(os.Args) < 2 {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(3)
	}
	commands := map[string]func([]string, string, io.Writer) int{
		"open": runOpen, "verify": runVerify, "restore": runRestore, "vectors": runVectors,
	}
	command := commands[os.Args[1]]
	flags := flag.NewFlagSet("df11go", flag.ExitOnError)
	flags.Usage = func() { fmt.Fprint(os.Stderr, usage) }
	folder := flags.String("folder", "", "")
	_ = flags.Parse(os.Args[2:])
	if command == nil || flags.NArg() == 0 {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(3)
	}
	os.Exit(command(flags.Args(), *folder, os.Stdout))
}

// openFile opens a container; the file stays open until the program ends.
func openFile(name string) (*df11.Container, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%q is no regular file", name)
	}
	return df11.Open(f, uint64(info.Size()))
}

func openModel(names []string, folder string) (*df11.Model, error) {
	var shards []*df11.Container
	for _, name := range names {
		c, err := openFile(name)
		if err != nil {
			return nil, err
		}
		shards = append(shards, c)
	}
	return df11.NewModel(folder, shards...)
}

// fail prints an error and returns the exit code for it. The text has none for
// a file that is Unsupported as a whole; it could not be checked.
func fail(out io.Writer, err error) int {
	fmt.Fprintln(out, err)
	switch df11.KindOf(err) {
	case df11.Corrupt, df11.Limit:
		return 1
	case df11.Unsupported:
		return 2
	}
	return 3
}

func runOpen(args []string, _ string, out io.Writer) int {
	for _, name := range args {
		c, err := openFile(name)
		if err != nil {
			return fail(out, err)
		}
		list(out, c)
	}
	return 0
}

// list prints with %q, which escapes control characters.
func list(out io.Writer, c *df11.Container) {
	fmt.Fprintf(out, "version %d.%d, shard %d of %d, identity %x\n",
		c.VersionMajor, c.VersionMinor, c.ShardIndex, c.ShardCount, c.Identity)
	for _, f := range c.Files {
		fmt.Fprintf(out, "file %q: kind %d, %d bytes\n", c.Text(f.Path), f.Kind, f.Length)
	}
	for i := range c.Tensors {
		t := &c.Tensors[i]
		_, size := t.Measure()
		fmt.Fprintf(out, "tensor %q: dtype %d, encoding %d, shape %d, %d bytes, supported %t\n",
			c.Text(t.Name), t.Dtype, t.Encoding, t.Shape[:t.DimensionCount], size, c.Supported(t))
	}
	for _, m := range c.Metadata {
		fmt.Fprintf(out, "metadata %q: %q\n", c.Text(m.Key), c.Text(m.Value))
	}
}

func runVerify(args []string, folder string, out io.Writer) int {
	m, err := openModel(args, folder)
	if err != nil {
		return fail(out, err)
	}
	return show(out, m.Verify())
}

func runRestore(args []string, folder string, out io.Writer) int {
	last := len(args) - 1
	m, err := openModel(args[:last], folder)
	if err != nil {
		return fail(out, err)
	}
	return show(out, m.Restore(args[last]))
}

func show(out io.Writer, r *df11.Report) int {
	if r.Broken != nil {
		fmt.Fprintln(out, "failed:", r.Broken)
	}
	for _, err := range r.Wrong {
		fmt.Fprintln(out, err)
	}
	for _, what := range r.Unchecked {
		fmt.Fprintln(out, "not checked:", what)
	}
	code := r.Exit()
	fmt.Fprintln(out, [...]string{"good", "wrong", "incomplete", "failed"}[code])
	return code
}
