//! The manual and the completion scripts: they cover every command, and the programs that read them accept them.

use crate::support::{Ran, farside, run};
use std::process::Command;

/// Returns every command that `--help` lists, as the list of its words after `farside`.
fn commands() -> Vec<Vec<String>> {
    let mut all = vec![Vec::new()];
    let mut next = 0;
    while let Some(above) = all.get(next).cloned() {
        next += 1;
        let help = farside(above.iter().map(String::as_str).chain(["--help"])).done();
        let listed = help.text().lines().skip_while(|line| *line != "Commands:").skip(1);
        let listed = listed.take_while(|line| !line.is_empty());
        // Names are indented by two columns, continuation lines by more.
        let names = listed.filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')));
        for name in names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help") {
            all.push(above.iter().cloned().chain([name.to_owned()]).collect());
        }
    }
    all
}

/// Runs a program on an input. Returns `None`, and prints a note, if the program is not installed.
fn judged_by(program: &str, arguments: &[&str], input: &[u8]) -> Option<Ran> {
    let found = Command::new("sh").args(["-c", "command -v \"$0\"", program]).output().expect("a shell");
    if !found.status.success() {
        eprintln!("{program} is not installed, so it checks nothing");
        return None;
    }
    let mut command = Command::new(program);
    command.args(arguments);
    Some(run(command, input))
}

#[test]
fn every_command_has_a_manual_page_without_mistakes() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("share/man1");
    farside([std::ffi::OsStr::new("man"), "--out".as_ref(), out.as_os_str()]).done();
    let commands = commands();
    assert!(
        commands.len() > 20 && commands.contains(&vec!["kv".to_owned(), "get".to_owned()]),
        "{commands:?}"
    );
    for command in &commands {
        let name = ["farside".to_owned()].iter().chain(command).cloned().collect::<Vec<_>>().join("-");
        let page =
            std::fs::read(out.join(format!("{name}.1"))).unwrap_or_else(|error| panic!("{name}: {error}"));
        // The page that is printed alone is the same.
        let alone = farside(["man"].into_iter().chain(command.iter().map(String::as_str))).done();
        assert!(alone.out == page, "{name}");
        for (program, arguments) in
            [("groff", &["-man", "-Tutf8", "-ww", "-z"][..]), ("mandoc", &["-Tlint", "-Wwarning"])]
        {
            if let Some(judged) = judged_by(program, arguments, &page) {
                let said = format!("{}{}", judged.text(), judged.err);
                // Pages have no date, so that the same binary writes the same bytes.
                let said: Vec<&str> = said.lines().filter(|line| !line.contains("missing date")).collect();
                assert!(said.is_empty(), "{program} of {name}: {said:?}");
            }
        }
    }
    let pages = std::fs::read_dir(&out).expect("a folder").count();
    assert_eq!(pages, commands.len(), "a page has no command");
    let page = farside(["man", "kv", "load"]).done();
    assert!(page.text().contains("\"Farside 0.1.0\" \"Farside Manual\""), "{}", page.text());
    farside(["man", "kv", "frob"]).refused("name one of put, get, contains, del");
    farside(["man", "kv", "get", "k"]).refused("leave 'k' out");
    farside(["man", "bench", "floor-server"]).refused("name one of ycsb, blocks, latch, txn, rpc, floor");
    farside(["man", "kv", "--out", "/tmp/unused"]).refused("cannot be used with");
    let file = folder.path().join("file");
    std::fs::write(&file, "").expect("a file");
    farside([std::ffi::OsStr::new("man"), "--out".as_ref(), file.as_os_str()]).refused("name another folder");
}

#[test]
fn shells_accept_their_completions_and_bash_completes_a_command() {
    for (shell, arguments) in [
        ("bash", &["-n"][..]),
        ("zsh", &["-n"]),
        ("fish", &["--no-execute"]),
        ("elvish", &["-compileonly"]),
        ("powershell", &[]),
    ] {
        let script = farside(["completions", shell]).done();
        for command in commands().iter().filter_map(|command| command.last()) {
            assert!(script.text().contains(command.as_str()), "the script for {shell} lacks {command}");
        }
        assert!(!script.text().contains("floor-server"), "the script for {shell} has a hidden command");
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(&file, &script.out).expect("a file");
        let arguments: Vec<&str> =
            arguments.iter().copied().chain([file.path().to_str().expect("UTF-8")]).collect();
        if let Some(judged) = (shell != "powershell").then(|| judged_by(shell, &arguments, b"")).flatten() {
            assert!(judged.code == Some(0) && judged.err.is_empty(), "{shell}: {}", judged.err);
        }
    }
    // Bash completes 'farside kv g'.
    let script = farside(["completions", "bash"]).done();
    let asked =
        "\nCOMP_WORDS=(farside kv g); COMP_CWORD=2; _farside farside g kv; echo \"${COMPREPLY[@]}\"\n";
    if let Some(judged) = judged_by("bash", &["-s"], &[&script.out, asked.as_bytes()].concat()) {
        assert_eq!(judged.done().text(), "get\n");
    }
    farside(["completions", "tcsh"]).refused("bash, elvish, fish, powershell, zsh");
    farside(["completions"]).refused("<SHELL>");
}
