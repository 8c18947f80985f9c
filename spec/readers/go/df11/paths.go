package df11

import "strings"

// checkPath checks one path (3, File).
func checkPath(path string) error {
	for _, r := range path {
		if r == '\\' || r == ':' || r < 0x20 || (r >= 0x7F && r <= 0x9F) {
			return corrupt("path %q holds %q", path, r)
		}
	}
	components := strings.Split(path, "/")
	for _, c := range components {
		if c == "" || c == "." || c == ".." {
			return corrupt("path %q has a component %q", path, c)
		}
		if len(c) > maxComponentBytes {
			return limit("a component of a path has %d bytes", len(c))
		}
	}
	if len(components) > maxPathComponents {
		return limit("a path has %d components", len(components))
	}
	return nil
}

// pathSet collects the paths of files that one folder is to hold.
type pathSet struct {
	paths   map[string]bool
	folders map[string]bool
}

func newPathSet() *pathSet {
	return &pathSet{map[string]bool{}, map[string]bool{}}
}

// add refuses a path that is there already.
func (s *pathSet) add(path string) error {
	if s.paths[path] {
		return corrupt("two files have the path %q", path)
	}
	s.paths[path] = true
	for i := range path {
		if path[i] == '/' {
			s.folders[path[:i]] = true
		}
	}
	return nil
}

// check refuses a path that is another one followed by `/` and more.
func (s *pathSet) check() error {
	for folder := range s.folders {
		if s.paths[folder] {
			return corrupt("%q is the path of a file and of a folder", folder)
		}
	}
	return nil
}
