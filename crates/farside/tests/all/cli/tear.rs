//! `tear`: what it finds in the examples, what it prints and writes, and its refusals.

use crate::support::{Ran, command, farside, run};
use std::path::{Path, PathBuf};
use std::time::Duration;

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/tear").join(name)
}

/// Runs `tear` on an example with these flags.
#[track_caller]
fn tear(name: &str, flags: &[&str]) -> Ran {
    let path = example(name);
    farside(["tear", path.to_str().expect("UTF-8")].iter().chain(flags))
}

#[test]
fn the_published_flaws_are_found_in_time() {
    for name in ["header-footer-broken.toml", "sherman-entry-broken.toml", "sherman-node-broken.toml"] {
        let ran = tear(name, &[]);
        assert_eq!(ran.code, Some(1), "{name}: {}", ran.err);
        assert!(ran.err.contains("a torn value was accepted"), "{}", ran.err);
        assert!(ran.took < Duration::from_secs(10), "{name} took {:?}", ran.took);
        let text = ran.text();
        for part in [
            "shrunk    operations ",
            "creates write 1",
            "accepts, since front == rear",
            "replay    farside tear ",
        ] {
            assert!(text.contains(part), "{name} lacks '{part}': {text}");
        }
        // The printed command finds the same schedule.
        let replay =
            text.lines().find_map(|line| line.strip_prefix("replay    farside ")).expect("a command");
        let again = farside(replay.split(' '));
        let schedule = |ran: &Ran| ran.text().split("\n\n").nth(1).map(str::to_owned);
        assert_eq!((again.code, schedule(&again)), (Some(1), schedule(&ran)), "{name}");
    }
}

#[test]
fn a_correct_scheme_exits_with_0_and_its_coverage() {
    for flags in [&["--schedules", "500"][..], &["--schedules", "500", "--relaxed"]] {
        let ran = tear("v2.toml", flags).done();
        assert!(
            ran.text().starts_with("two ordered READs: no tear in 500 schedules\ncoverage "),
            "{}",
            ran.text()
        );
        assert!(ran.text().contains(" orders of accesses"), "{}", ran.text());
    }
    let json = tear("v2.toml", &["--schedules", "500", "--json"]).done().json();
    assert_eq!((&json["found"], &json["coverage"]["schedules"]), (&serde_json::Value::Null, &500.into()));
}

#[test]
fn relaxed_ordering_breaks_a_write_that_frees_the_lock() {
    tear("unlatch.toml", &["--schedules", "500"]).done();
    let ran = tear("unlatch.toml", &["--relaxed", "--json"]);
    assert_eq!(ran.code, Some(1), "{}", ran.err);
    assert_eq!(ran.json()["relaxed"], true);
}

#[test]
fn a_finding_is_written_as_json_and_drawn() {
    let folder = tempfile::tempdir().expect("a folder");
    let svg = folder.path().join("tear.svg");
    let ran = tear("header-footer-broken.toml", &["--json", "--svg", svg.to_str().expect("UTF-8")]);
    assert_eq!(ran.code, Some(1), "{}", ran.err);
    let json = ran.json();
    assert_eq!((&json["found"]["kind"], &json["relaxed"]), (&"torn".into(), &false.into()));
    assert_eq!(json["found"]["after"]["operations"], 2);
    let schedule = json["found"]["schedule"].as_array().expect("lines");
    let last = schedule.last().expect("a line");
    assert_eq!((&last["who"], &last["what"]), (&"reader 1".into(), &"accepts".into()));
    let read = schedule.iter().find(|line| line["what"] == "read" && line["who"] == "reader 1");
    assert!(read.expect("the reader reads")["lines"].is_array());
    let drawn = std::fs::read_to_string(&svg).expect("it was written");
    assert!(drawn.starts_with("<svg ") && drawn.trim_end().ends_with("</svg>"), "{drawn}");
    for line in schedule {
        let text = line["text"].as_str().expect("text").replace('&', "&amp;").replace('>', "&gt;");
        assert!(drawn.contains(&text), "the drawing lacks '{text}'");
    }
    std::fs::remove_file(&svg).expect("it exists");
    let none = tear("basic.toml", &["--schedules", "9", "--svg", svg.to_str().expect("UTF-8")]).done();
    assert!(none.err.contains("no picture written") && !svg.exists(), "{}", none.err);
}

#[test]
fn bad_input_exits_with_2_and_a_remedy() {
    tear("none.toml", &[]).refused("name a description, such as one of examples/tear");
    tear("basic.toml", &["--schedules", "0"]).refused("0 is not in 1..");
    tear("basic.toml", &["--svg", "/no/such/folder/tear.svg"]).refused("name a file that can be written");
    tear("basic.toml", &["--seconds", "1s"]).refused("--real");
    tear("basic.toml", &["--real", "--relaxed"]).refused("cannot be used with");
    tear("basic.toml", &["--real", "--seconds", "0"]).refused("give --seconds from 1ms to 1h");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("wrong.toml");
    let good = std::fs::read_to_string(example("basic.toml")).expect("text");
    std::fs::write(&path, good.replace("\"WRITE body\"", "\"WRITE bodi\"")).expect("written");
    let line = good.lines().position(|line| line.contains("WRITE body")).expect("a line") + 1;
    farside(["tear".as_ref(), path.as_os_str()])
        .refused(&format!("wrong.toml:{line}: there is no field 'bodi': name all, or one of lock, body"));
    std::fs::write(&path, [0xff, 0xfe]).expect("written");
    farside(["tear".as_ref(), path.as_os_str()]).refused("cannot read");
}

#[test]
fn real_memory_reports_what_was_seen() {
    let ran = tear("crc.toml", &["--real", "--seconds", "300ms", "--json"]).done();
    let real = &ran.json()["real"];
    for count in ["writes", "accepted"] {
        assert!(real[count].as_u64() > Some(0), "{real}");
    }
    assert_eq!((&real["torn"], &real["stale"]), (&0.into(), &0.into()), "{real}");
    let text = tear("crc.toml", &["--real", "--seconds", "50ms"]).done();
    assert!(
        text.text().contains("reads accepted") && text.text().contains("0 torn, 0 stale"),
        "{}",
        text.text()
    );
}

/// Returns the blocks of code in a language that a page has.
fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    let parts = page.split(fence.as_str()).skip(1);
    parts.map(|part| part.split("```").next().unwrap_or_default()).collect()
}

#[test]
fn the_guide_shows_what_the_command_prints() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/guide/tear.md")).expect("the page");
    let name = "examples/tear/header-footer-broken.toml";
    let text = std::fs::read_to_string(root.join(name)).expect("text");
    let files = blocks(&page, "toml");
    assert_eq!(files.first(), Some(&text.as_str()), "the page shows {name}");

    let folder = tempfile::tempdir().expect("a folder");
    let svg = folder.path().join("tear.svg");
    let mut tear = command();
    tear.current_dir(&root).args(["tear", name, "--svg"]).arg(&svg);
    let ran = run(tear, b"");
    let expected = format!("$ farside tear {name}\n{}", ran.text());
    assert!(blocks(&page, "console").contains(&expected.as_str()), "the page lacks:\n{expected}");
    let drawn = std::fs::read_to_string(&svg).expect("it was written");
    let kept = std::fs::read_to_string(root.join("docs/tear.svg")).expect("the page's picture");
    assert!(drawn == kept, "write docs/tear.svg again, by --svg");

    // The page's other file is correct, as it claims.
    let other = folder.path().join("other.toml");
    std::fs::write(&other, files[1]).expect("written");
    for flags in [&["--schedules", "500"][..], &["--schedules", "500", "--relaxed"]] {
        farside([&["tear", other.to_str().expect("UTF-8")], flags].concat()).done();
    }
    assert_eq!(files.len(), 2);
}
