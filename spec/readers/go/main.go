// Command df11go opens, verifies and restores df11 containers.
package main

import (
	"flag"
	"fmt"
	"os"

	"df11go/df11"
)

const usage = `usage:
  df11go open FILE
  df11go verify [-folder DIR] [-base BASE] FILE...
  df11go restore [-folder DIR] [-base BASE] FILE... OUT
  df11go vectors DIR

Several FILEs are shards of one model. DIR of verify and restore holds the side
files that lie beside the containers. BASE is the container of the base model of
tensors in delta. Exit codes: 0 good, 1 wrong, 2 something
could not be checked, 3 anything else.
`

var commands = map[string]func(m *df11.Model, out string) int{
	"open":    func(m *df11.Model, _ string) int { return list(m) },
	"verify":  func(m *df11.Model, _ string) int { return show(m.Verify()) },
	"restore": func(m *df11.Model, out string) int { return show(m.Restore(out)) },
}

func main() {
	flags := flag.NewFlagSet("df11go", flag.ExitOnError)
	flags.Usage = func() { fmt.Fprint(os.Stderr, usage) }
	folder, base := flags.String("folder", "", ""), flags.String("base", "", "")
	name := ""
	if len(os.Args) > 1 {
		name = os.Args[1]
		_ = flags.Parse(os.Args[2:])
	}
	command, files, out := commands[name], flags.Args(), ""
	if name == "restore" && len(files) > 0 {
		out, files = files[len(files)-1], files[:len(files)-1]
	}
	switch {
	case name == "vectors" && len(files) == 1:
		os.Exit(runVectors(files[0]))
	case command == nil || len(files) == 0:
		flags.Usage()
		os.Exit(3)
	}
	m, err := openModel(files, *folder, *base)
	if err != nil {
		os.Exit(fail(err))
	}
	os.Exit(command(m, out))
}

func openModel(names []string, folder, base string) (*df11.Model, error) {
	var shards []*df11.Container
	for _, name := range names {
		c, err := openFile(name)
		if err != nil {
			return nil, err
		}
		if base != "" {
			if c.Base, err = openFile(base); err != nil {
				return nil, err
			}
		}
		shards = append(shards, c)
	}
	return df11.NewModel(folder, shards...)
}

func openFile(name string) (*df11.Container, error) {
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	return df11.Open(b)
}

// fail prints an error and returns the exit code for it. The text has none for
// a file that is Unsupported as a whole; it could not be checked.
func fail(err error) int {
	fmt.Println(err)
	switch df11.KindOf(err) {
	case df11.Corrupt, df11.Limit:
		return 1
	case df11.Unsupported:
		return 2
	}
	return 3
}

// list prints with %q, which escapes control characters.
func list(m *df11.Model) int {
	for _, c := range m.Shards {
		fmt.Printf("version %d.%d, shard %d of %d, identity %x\n",
			c.VersionMajor, c.VersionMinor, c.ShardIndex, c.ShardCount, c.Identity)
		for _, f := range c.Files {
			fmt.Printf("file %q: kind %d, %d bytes\n", c.Text(f.Path), f.Kind, f.Length)
		}
		for i := range c.Tensors {
			t := &c.Tensors[i]
			_, size := t.Measure()
			fmt.Printf("tensor %q: dtype %d, encoding %d, shape %d, %d bytes, supported %t\n",
				c.Text(t.Name), t.Dtype, t.Encoding, t.Shape[:t.DimensionCount], size, c.Supported(t))
		}
		for _, m := range c.Metadata {
			fmt.Printf("metadata %q: %q\n", c.Text(m.Key), c.Text(m.Value))
		}
	}
	return 0
}

// show prints a report and returns its exit code.
func show(r *df11.Report) int {
	if r.Broken != nil {
		fmt.Println("failed:", r.Broken)
	}
	for _, err := range r.Wrong {
		fmt.Println(err)
	}
	for _, what := range r.Unchecked {
		fmt.Println("not checked:", what)
	}
	code := r.Exit()
	fmt.Println([...]string{"good", "wrong", "incomplete", "failed"}[code])
	return code
}
