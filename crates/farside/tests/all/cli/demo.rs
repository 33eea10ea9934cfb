//! `demo`: its text, its JSON, its page in a browser, and the files that it overwrites.

use crate::support::{command, farside};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Timeout of a demo with few records, on a busy machine.
const DEMO_MAX: Duration = Duration::from_secs(240);
/// Timeout of a browser for a page.
const BROWSER_MAX: Duration = Duration::from_secs(60);

const FABRICS: [&str; 6] = ["local", "shm", "ring", "udp", "tcp", "tls"];

fn fabrics() -> impl Iterator<Item = &'static str> {
    FABRICS.into_iter().filter(|&fabric| cfg!(feature = "tls") || fabric != "tls")
}

/// Runs a demo with few records in `folder`; returns its standard output.
fn demo(folder: &Path, arguments: &[&str]) -> String {
    let mut command = command();
    command.current_dir(folder).args(["demo", "--records", "20000", "--seconds", "0.1"]).args(arguments);
    if let Some(path) = std::env::var_os("PATH") {
        command.env("PATH", path); // So that rivals are found.
    }
    let ended = assert_cmd::Command::from_std(command).timeout(DEMO_MAX).output().expect("it can be started");
    let err = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success() && !err.contains("panicked"), "{err}");
    String::from_utf8(ended.stdout).expect("text")
}

#[test]
fn the_demo_shows_a_client_that_reads_from_a_stopped_node() {
    let folder = tempfile::tempdir().expect("a folder");
    let text = demo(folder.path(), &["--no-html", "--no-rivals"]);
    let rate = |of: &str| -> f64 {
        let line = text.lines().find(|line| line.contains(of)).expect("the line is printed");
        let rate = line.split_whitespace().find_map(|word| word.parse().ok());
        rate.unwrap_or_else(|| panic!("no number: {line}"))
    };
    for of in ["before 'kill -STOP'", "while it is stopped", "after 'kill -CONT'"] {
        assert!(rate(of) > 0.0, "{text}");
    }
    assert!(text.contains("of the floor's rate"), "{text}");
    let row = |start: &str| {
        text.lines()
            .filter(|line| line.split("  ").next().is_some_and(|cell| cell.trim_end() == start))
            .count()
    };
    for fabric in fabrics() {
        assert_eq!(row(fabric), 5, "{fabric}: {text}");
    }
    for (floor, rows) in [("by hand", 5), ("by hand, ring", 3), ("by hand, udp", 3), ("by hand, tcp", 3)] {
        assert_eq!(row(floor), rows, "{floor}: {text}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0, "--no-html writes no file");
}

#[test]
fn the_demos_page_shows_every_figure_and_the_numbers_of_the_json() {
    let folder = tempfile::tempdir().expect("a folder");
    let page = folder.path().join("farside-demo.html");
    std::fs::write(&page, "").expect("written"); // The demo may overwrite an empty file.
    let reported = demo(folder.path(), &["--json"]);
    let rows: Vec<serde_json::Value> =
        reported.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let of = |what: &str| rows.iter().filter(|row| row["measured"] == what).collect::<Vec<_>>();
    let runs = of("ycsb");
    assert_eq!((of("machine").len(), of("stopped").len(), of("floor").len()), (1, 1, 14), "{reported}");
    assert_eq!(runs.len(), 5 * fabrics().count(), "{reported}");
    for fabric in fabrics() {
        let its = runs.iter().filter(|run| run["fabric"] == fabric);
        let tasks: Vec<u64> = its.map(|run| run["tasks"].as_u64().expect("a number")).collect();
        assert_eq!(tasks, [1, 4, 16, 64, 16], "{fabric}");
    }
    let stopped = of("stopped")[0];
    assert!(stopped["while_ops_per_s"].as_f64() > Some(0.0), "{stopped}");
    assert_eq!(stopped["intervals"].as_array().expect("an array").len(), 60);
    let is_compared = !of("compare").is_empty();
    assert_eq!(is_compared, cfg!(feature = "lmdb") || is_on_path("redis-server") || is_on_path("memcached"));

    let html = std::fs::read_to_string(&page).expect("a page");
    for run in &runs {
        let cells = ["fabric", "workload", "tasks"].map(|field| run[field].to_string().replace('"', ""));
        let rate = format!("{:.0}", run["ops_per_s"].as_f64().expect("a rate"));
        let [fabric, workload, tasks] = cells;
        let row =
            format!("<th scope=\"row\">{fabric}</th><td>{workload}</td><td>{tasks}</td><td>{rate}</td>");
        assert!(html.contains(&row), "{row}");
    }
    let figures = if is_compared { 11 } else { 9 };
    assert_eq!(html.matches("<svg ").count(), figures);
    in_a_browser(&page, figures);
}

#[test]
fn the_demo_overwrites_no_file_but_its_own_pages() {
    let folder = tempfile::tempdir().expect("a folder");
    let mine = folder.path().join("mine.html");
    std::fs::write(&mine, "<!DOCTYPE html>mine").expect("written");
    let to = |path: &Path| {
        let path = path.to_str().expect("UTF-8").to_owned();
        farside(["demo".into(), "--html".into(), path])
    };
    to(&mine).refused("exists and is not a page of 'farside demo': name another with --html FILE");
    assert_eq!(std::fs::read(&mine).expect("the file exists"), b"<!DOCTYPE html>mine");
    to(&folder.path().join("absent/page.html")).refused("omit the page with --no-html");
    to(folder.path()).refused("cannot write");
    farside(["demo", "--html", "x", "--no-html"]).refused("cannot be used with");
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing was left behind");
}

fn is_on_path(program: &str) -> bool {
    found(program).is_some()
}

fn found(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|program| program.is_file())
}

/// Checks the page in a browser: it has `figures` figures, each large enough to read and within the window's width, and
/// its screenshot is not blank. Without a browser, prints that the check is skipped.
fn in_a_browser(page: &Path, figures: usize) {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let Some(browser) = names.into_iter().find_map(found) else {
        println!("no browser ({}) is on PATH: the look of the page is not tested", names.join(", "));
        return;
    };
    let folder = page.parent().expect("a page is in a folder");
    // The page itself has no script: this copy has one, which measures the figures.
    let measured = folder.join("measured.html");
    let script = "<script>const told = [...document.querySelectorAll('figure svg')].map(svg => { const b = \
                  svg.getBoundingClientRect(); const drawn = svg.getBBox(); return [b.width, b.height, drawn.width, \
                  drawn.height].map(Math.round).join(' '); }); document.body.innerHTML = '<p id=told>' + \
                  told.concat(document.documentElement.scrollWidth - window.innerWidth).join(';') + '</p>';</script>";
    let html = std::fs::read_to_string(page).expect("a page");
    std::fs::write(&measured, html.replace("</main>", &format!("</main>{script}"))).expect("written");
    for width in [500, 1280] {
        let reported = browse(
            &browser,
            folder,
            &measured,
            &["--dump-dom".into(), format!("--window-size={width},4000")],
        );
        let reported = reported.split("<p id=\"told\">").nth(1).and_then(|rest| rest.split("</p>").next());
        let mut reported: Vec<&str> = reported.expect("the script has run").split(';').collect();
        let beyond: i32 = reported.pop().expect("a number").parse().expect("a number");
        assert!(beyond <= 0, "the page is {beyond} pixels wider than its window of {width}");
        assert_eq!(reported.len(), figures);
        for figure in reported {
            let extents: Vec<i32> = figure.split(' ').map(|n| n.parse().expect("a number")).collect();
            assert!(extents[0] >= 200 && extents[1] >= 60, "too small at {width}: {figure}");
            assert!(extents[2] >= 200 && extents[3] >= 50, "almost nothing is drawn at {width}: {figure}");
        }
    }
    let picture = folder.join("page.png");
    let to = format!("--screenshot={}", picture.display());
    browse(&browser, folder, page, &[to, "--window-size=1280,4000".into()]);
    let png = std::fs::read(&picture).expect("a picture");
    assert!(png.starts_with(b"\x89PNG\r\n\x1a\n"));
    // A picture of this size in a single colour compresses to about 20 KB.
    assert!(png.len() > 100_000, "the picture is nearly blank: {} bytes", png.len());
}

/// Runs the browser with its own profile and without a network; returns its output.
fn browse(browser: &Path, folder: &Path, page: &Path, arguments: &[String]) -> String {
    let profile = tempfile::tempdir_in(folder).expect("a folder");
    let mut command = Command::new(browser);
    command
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(arguments)
        .arg(format!("file://{}", page.display()))
        .stdin(Stdio::null());
    let ended =
        assert_cmd::Command::from_std(command).timeout(BROWSER_MAX).output().expect("it can be started");
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    String::from_utf8(ended.stdout).expect("text")
}
