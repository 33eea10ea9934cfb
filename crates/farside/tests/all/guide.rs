//! The user's guide agrees with the code: its commands parse, the errors that it explains occur in the sources, it has
//! every metric of a node, and its reference is the binary's help. `cargo xtask tidy` checks the links.
//!
//! Invariant: an error that a user can see and that the guide does not explain fails a test here.

use crate::support::{command, run, serve};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

const TROUBLES: &str = include_str!("../../../../docs/guide/troubleshooting.md");
const OPERATIONS: &str = include_str!("../../../../docs/guide/operations.md");

/// Types with a `Display` that the guide need not explain: they are no errors by themselves, or users never see them.
const NO_ERRORS: [&str; 10] = [
    "Source",      // An address.
    "Listen",      // A url.
    "OpView",      // An op, in a trace.
    "Rights",      // Words.
    "Status",      // In brackets, within "the node refused the operation".
    "WireError",   // Caused by chains that no builder makes.
    "PacketError", // Counted, and not reported.
    "Strikes",     // Counts of faults.
    "Healed",      // A line of a report.
    "QueueError",  // Queues exist in trials only.
];

/// Environment variable. If it is 1, the test writes the command-line reference instead of comparing it.
const BLESS: &str = "FARSIDE_BLESS";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the path and the text of every Rust file of the crates that commands and programs of users run.
fn sources() -> Vec<(PathBuf, String)> {
    let mut folders: Vec<PathBuf> = ["remote", "fabrics", "node", "systems", "predict", "farside"]
        .map(|name| root().join("crates").join(name).join("src"))
        .into();
    folders.push(root().join("bench/src"));
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder of sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).expect("text");
                files.push((path, text));
            }
        }
    }
    assert!(files.len() > 100, "the sources are in their usual place");
    files
}

/// Returns the string literals of Rust code, unescaped, with `…` for each placeholder.
fn literals(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = code;
    while let Some(at) = rest.find(['"', '\'', '/']) {
        let (before, here) = rest.split_at(at);
        rest = match here.as_bytes() {
            [b'/', b'/', ..] => here.find('\n').map_or("", |end| &here[end..]),
            [b'\'', b'\\', ..] => &here[2..][here[3..].find('\'').map_or(1, |end| end + 2)..],
            [b'\'', ..] => {
                let mut letters = here[1..].char_indices();
                letters.next();
                match letters.next() {
                    Some((end, '\'')) => &here[end + 2..], // A character; else a lifetime.
                    _ => &here[1..],
                }
            }
            [b'"', ..] if before.ends_with('r') || before.ends_with('#') => {
                let hashes = before.len() - before.trim_end_matches('#').len();
                let closing = format!("\"{}", "#".repeat(hashes));
                let (text, after) = here[1..].split_once(&closing).expect("a raw literal ends");
                found.push(shown(text));
                after
            }
            [b'"', ..] => {
                let (text, after) = unescaped(&here[1..]);
                found.push(shown(&text));
                after
            }
            _ => &here[1..],
        };
    }
    found
}

/// Splits code after an opening quote into the unescaped literal and the remaining code.
fn unescaped(code: &str) -> (String, &str) {
    let mut text = String::new();
    let mut letters = code.char_indices();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '"' => return (text, &code[at + 1..]),
            '\\' => match letters.next() {
                Some((at, '\n')) => {
                    let after = code[at..].trim_start();
                    letters = code.char_indices();
                    let skipped = code[..code.len() - after.len()].chars().count();
                    letters.nth(skipped - 1);
                }
                Some((_, 'n')) => text.push('\n'),
                Some((_, 't')) => text.push('\t'),
                Some((_, escaped)) => text.push(escaped),
                None => break,
            },
            letter => text.push(letter),
        }
    }
    panic!("a literal ends")
}

/// Replaces each placeholder of a format string with `…`.
fn shown(format: &str) -> String {
    let mut text = String::new();
    let mut letters = format.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '{' | '}' if letters.peek() == Some(&letter) => {
                letters.next();
                text.push(letter);
            }
            '{' => {
                letters.by_ref().find(|&letter| letter == '}');
                text.push('…');
            }
            letter => text.push(letter),
        }
    }
    text
}

/// Returns the errors that the guide explains. Each is a list item that is one span of code, possibly over several
/// lines.
fn explained() -> Vec<String> {
    let mut items: Vec<String> = Vec::new();
    let mut is_open = false;
    for line in TROUBLES.lines() {
        if line.starts_with("- `") {
            items.push(line[2..].to_owned());
            is_open = true;
        } else if let Some(more) = line.strip_prefix("  ").filter(|_| is_open) {
            let item = items.last_mut().expect("one was begun");
            *item = format!("{item} {more}");
        } else {
            is_open = false;
        }
    }
    let code = |item: String| {
        let inner = item.strip_prefix('`').and_then(|item| item.strip_suffix('`'));
        inner.unwrap_or_else(|| panic!("an explained error is one span of code: {item}")).to_owned()
    };
    items.into_iter().map(code).collect()
}

#[test]
fn every_error_in_the_guide_occurs_in_the_sources() {
    let literals: Vec<String> = sources().iter().flat_map(|(_, text)| literals(text)).collect();
    let explained = explained();
    assert!(explained.len() > 150, "the guide's errors are read: {}", explained.len());
    let unknown: Vec<&String> = explained
        .iter()
        .filter(|error| !literals.iter().any(|literal| literal.contains(&***error)))
        .collect();
    assert!(
        unknown.is_empty(),
        "no source has these errors; correct docs/guide/troubleshooting.md: {unknown:#?}"
    );
}

#[test]
fn the_guide_explains_every_error_that_a_user_can_see() {
    const WORDS_MIN: usize = 4;
    let explained = explained();
    let (mut missing, mut seen) = (Vec::new(), 0);
    for (path, text) in sources() {
        if path.starts_with(root().join("bench")) {
            continue;
        }
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            let Some((_, name)) = line.split_once("Display for ").filter(|_| line.starts_with("impl")) else {
                continue;
            };
            let name = name.trim_end_matches([' ', '{']).split('<').next().unwrap_or_default();
            if NO_ERRORS.contains(&name) {
                continue;
            }
            let block: String =
                lines.by_ref().take_while(|&line| line != "}").flat_map(|line| [line, "\n"]).collect();
            for literal in literals(&block) {
                if literal.split_whitespace().filter(|word| *word != "…").count() < WORDS_MIN {
                    continue;
                }
                seen += 1;
                if !explained
                    .iter()
                    .any(|error| literal.contains(&**error) && error.len() * 4 > literal.len())
                {
                    missing.push(format!("{name}: {literal}"));
                }
            }
        }
    }
    assert!(seen > 60, "the errors are read: {seen}");
    assert!(missing.is_empty(), "explain them in docs/guide/troubleshooting.md: {missing:#?}");
}

/// Splits a command into words as a shell does, up to a redirection or the next command.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let (mut word, mut quote, mut has_word) = (String::new(), None, false);
    for letter in line.chars() {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (Some(_), _) => word.push(letter),
            (None, '\'' | '"') => (quote, has_word) = (Some(letter), true),
            (None, '|' | '>' | '<' | '&' | ';' | '#') => break,
            (None, _) if letter.is_whitespace() => {
                if std::mem::take(&mut has_word) {
                    words.push(std::mem::take(&mut word));
                }
            }
            (None, _) => {
                word.push(letter);
                has_word = true;
            }
        }
    }
    if has_word {
        words.push(word);
    }
    words
}

/// Returns the words of each `farside` command of a page: after a prompt, or in a systemd unit's `ExecStart`.
fn commands(page: &str) -> Vec<Vec<String>> {
    let page = page.replace("\\\n", " ");
    let lines = page.lines().filter_map(|line| line.strip_prefix("$ ").or(line.strip_prefix("ExecStart=")));
    lines
        .map(words)
        .filter_map(|words| {
            let at = words.iter().position(|word| !word.contains('=') || word.starts_with('-'))?;
            let is_ours = Path::new(&words[at]).file_name().is_some_and(|name| name == "farside");
            is_ours.then(|| words[at + 1..].to_vec())
        })
        .collect()
}

#[test]
fn every_command_of_the_guide_parses() {
    let mut seen = 0;
    for entry in std::fs::read_dir(root().join("docs/guide")).expect("the guide") {
        let path = entry.expect("a page").path();
        for words in commands(&std::fs::read_to_string(&path).expect("text")) {
            // clap parses the arguments before `--help`, and rejects unknown ones.
            let mut help = command();
            // `shell` takes all further words as a command of its own.
            let is_shells = words.first().is_some_and(|word| word == "shell");
            help.args(if is_shells { &words[..1] } else { &words[..] }).arg("--help");
            let ran = run(help, b"");
            assert_eq!(ran.code, Some(0), "{}: farside {}: {}", path.display(), words.join(" "), ran.err);
            seen += 1;
        }
    }
    assert!(seen > 20, "the guide's commands are found: {seen}");
}

#[test]
fn an_invalid_command_would_be_noticed() {
    for line in ["farside serve --memroy 1GiB", "farside serve --memory 7MiB", "farside servr"] {
        let mut help = command();
        help.args(&words(line)[1..]).arg("--help");
        assert_ne!(run(help, b"").code, Some(0), "{line}");
    }
}

#[test]
fn the_guide_has_exactly_the_metrics_of_a_node() {
    let folder = tempfile::tempdir().expect("a folder");
    let arguments = ["--memory", "8MiB", "--admin", "127.0.0.1:0"];
    let node = serve(&folder.path().join("node.sock"), &arguments, folder.path().join("log"));
    node.line();
    let line = node.line();
    let at = line.split_once("http://").and_then(|(_, rest)| rest.split_once("/{")).expect("a url").0;
    let mut stream = std::net::TcpStream::connect(at).expect("it listens");
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")
        .expect("it accepts a request");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("it responds");
    let shown: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("farside_"))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(shown.len() > 20, "{text}");

    let table = OPERATIONS
        .split_once("\n## Metrics")
        .and_then(|(_, rest)| rest.split_once("\nThe metrics have no labels"));
    let table = table.expect("the guide has a table of metrics").0;
    let mut documented: Vec<String> = Vec::new();
    for row in table.lines().filter(|line| line.starts_with("| `")) {
        for name in row.split('|').nth(1).unwrap_or_default().split(',') {
            let name = name.trim().trim_matches('`');
            // `_out_total` replaces the same number of words at the end of the row's first name.
            let full = match documented.last().filter(|_| name.starts_with('_')) {
                Some(last) => {
                    let ends = name.matches('_').count();
                    let kept: Vec<&str> = last.split('_').collect();
                    format!("{}{name}", kept[..kept.len() - ends].join("_"))
                }
                None => name.to_owned(),
            };
            documented.push(full);
        }
    }
    for name in &shown {
        assert!(documented.iter().any(|known| known == name), "the guide lacks {name}");
    }
    for name in &documented {
        assert!(shown.contains(&&**name), "the guide has {name}, which no node has");
    }
}

/// Appends the help of a command, and then the help of each of its subcommands.
fn append_help(page: &mut String, names: &[&str]) {
    let mut help = command();
    help.args(names).arg("--help");
    let help = run(help, b"").done();
    let title = ["farside"].iter().chain(names).copied().collect::<Vec<_>>().join(" ");
    page.push_str(&format!("\n## {title}\n\n```text\n"));
    for line in help.text().trim_end().lines() {
        page.push_str(line.trim_end());
        page.push('\n');
    }
    page.push_str("```\n");
    let below = help.text().lines().skip_while(|line| *line != "Commands:").skip(1);
    for line in below.take_while(|line| !line.is_empty()) {
        // Continuation lines of a description are indented further.
        let name = line.strip_prefix("  ").filter(|line| !line.starts_with(' '));
        let name = name.and_then(|line| line.split_whitespace().next()).unwrap_or_default();
        if !["", "help"].contains(&name) {
            append_help(page, &[names, &[name]].concat());
        }
    }
}

#[test]
fn the_reference_is_the_binarys_help() {
    // Features change the help, and the reference is that of the default ones.
    if cfg!(not(all(feature = "tls", feature = "lmdb"))) {
        return;
    }
    let remedy = "run 'FARSIDE_BLESS=1 cargo test -p farside --test all guide'";
    let mut page =
        "# Command-line reference\n\nPurpose: look up a command or a flag. [Commands at work](commands.md) \
                    shows examples. This page is written from\nthe binary's `--help`: do not edit it, \
                    see [CONTRIBUTING](../../CONTRIBUTING.md#a-first-change-step-by-step).\n"
            .to_owned();
    append_help(&mut page, &[]);
    let path = root().join("docs/guide/cli.md");
    if std::env::var_os(BLESS).is_some_and(|value| value == "1") {
        std::fs::write(&path, &page).expect("the reference is written");
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = page.lines().zip(written.lines()).find(|(new, old)| new != old);
    assert!(page == written, "docs/guide/cli.md differs from the help, first at {differs:?}; {remedy}");
}

#[test]
fn every_page_of_the_guide_begins_with_its_purpose() {
    let pages = std::fs::read_dir(root().join("docs/guide")).expect("the guide's folder");
    for page in pages {
        let path = page.expect("an entry").path();
        let text = std::fs::read_to_string(&path).expect("text");
        let is_stated = text.lines().nth(2).is_some_and(|line| line.starts_with("Purpose: "));
        assert!(is_stated, "{}: state its purpose below the title", path.display());
    }
}
