//! Tokens: creation, rights, revocation, and the lock-out after wrong guesses.

use crate::cli::admin::answer_to;
use crate::support::{PATIENCE, Process, Ran, command, farside, run, serve, until};
use rustix::process::Signal;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tempfile::TempDir;

/// A node that requires tokens, and a folder with its file of tokens and the clients' secrets.
struct Guarded {
    node: Process,
    url: String,
    folder: TempDir,
}

/// Tokens of a node at its start: the name and the arguments of `farside token new`.
const TOKENS: [(&str, &[&str]); 4] = [
    ("root", &["--admin", "--store", "*=all"]),
    ("web", &["--store", "default=all"]),
    ("reader", &["--store", "default=read"]),
    ("other", &["--store", "another=all"]),
];

impl Guarded {
    fn start(scheme: &str) -> Guarded {
        Guarded::with(scheme, &[])
    }

    fn with(scheme: &str, more: &[&str]) -> Guarded {
        let folder = tempfile::tempdir().expect("a folder");
        let entries: String = TOKENS.map(|(name, rights)| entry(folder.path(), name, rights)).concat();
        let file = private(folder.path(), "tokens.toml", &entries);
        let listen = format!("{scheme}://127.0.0.1:0");
        let file = file.to_str().expect("UTF-8");
        let arguments = [
            &[
                "--memory", "32MiB", "--store", "default", "--quota", "8MiB", "--listen", &listen,
                "--tokens", file,
            ],
            more,
        ];
        let socket = folder.path().join("node.sock");
        let node = match more.contains(&"--shm-trusts-all") {
            true => serve(&socket, &arguments.concat(), folder.path().join("log")),
            false => alone(&arguments.concat(), folder.path().join("log")),
        };
        let ready = node.line();
        assert_eq!(ready.contains("shm:"), more.contains(&"--shm-trusts-all"), "{ready}");
        let at = node.line();
        let (_, url) = at.split_once(" at ").unwrap_or_else(|| panic!("no url in '{at}'"));
        Guarded { node, url: url.to_owned(), folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs a command with the token called `name`.
    #[track_caller]
    fn run_as(&self, name: &str, arguments: &[&str]) -> Ran {
        let mut command = command();
        command.env("FARSIDE_POOL", &self.url).env("FARSIDE_TOKEN_FILE", self.path(name)).args(arguments);
        run(command, b"")
    }

    /// Rewrites the file of tokens, and makes the node reload it. `is_kept` maps a token's name to its new rights, or
    /// to `None` to remove it.
    fn reload(&self, is_kept: impl Fn(&str) -> Option<&'static str>) {
        let path = self.path("tokens.toml");
        let before = std::fs::read_to_string(&path).expect("the file of tokens");
        let entries = before.split("[[token]]").filter(|entry| !entry.trim().is_empty());
        let kept = entries.filter_map(|entry| {
            let name = entry.split('"').nth(1).expect("a name");
            let rights = is_kept(name)?;
            let head = entry.split("[token.stores]").next().expect("a beginning");
            Some(format!("[[token]]{head}[token.stores]\n{rights}\n"))
        });
        std::fs::write(&path, kept.collect::<String>()).expect("it is writable");
        let reloads = || self.node.log().matches("reloaded").count();
        let before = reloads();
        self.node.signal(Signal::HUP);
        until("the tokens are reloaded", || reloads() > before);
    }
}

/// Starts a node without a `shm` socket.
fn alone(arguments: &[&str], log: PathBuf) -> Process {
    let mut command = command();
    command.args(["serve", "--die-with-parent"]).args(arguments);
    Process::start(command, log)
}

/// Creates a file that no other user may read.
fn private(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).expect("a file");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("a file of the test");
    path
}

/// Creates a token and writes its secret into the file `name`. Returns the token's entry for the node's file of tokens.
fn entry(folder: &Path, name: &str, rights: &[&str]) -> String {
    let secret = folder.join(name);
    let secret = secret.to_str().expect("UTF-8");
    let made = farside([&["token", "new", "--name", name, "--secret-file", secret], rights].concat()).done();
    made.text().to_owned()
}

#[test]
fn a_new_token_works_once_the_node_has_its_entry() {
    let folder = tempfile::tempdir().expect("a folder");
    let made =
        farside(["token", "new", "--name", "a", "--store", "default=read,write", "--store", "b=all"]).done();
    let text = made.text();
    let secret = text.lines().find(|line| line.starts_with("farside_")).expect("the secret").to_owned();
    assert_eq!(secret.len(), "farside_".len() + 64);
    let (_, entry) = text.split_once("[[token]]").expect("the entry");
    assert!(!entry.contains(&secret), "the node's entry contains the secret");
    let again = farside(["token", "new", "--name", "a", "--store", "default=read"]).done();
    assert!(!again.text().contains(&secret), "two tokens have the same secret");

    let guarded = Guarded::start("tcp");
    let with = std::fs::read_to_string(guarded.path("tokens.toml")).expect("the file") + "[[token]]" + entry;
    std::fs::write(guarded.path("tokens.toml"), with).expect("a file of the test");
    private(guarded.folder.path(), "a", &format!("  {secret}\n"));
    guarded.run_as("a", &["info"]).refused("does not know this token");
    guarded.node.signal(Signal::HUP);
    until("the new token is known", || guarded.run_as("a", &["info"]).code == Some(0));

    // A secret is written to a new private file, and never over an existing one.
    let path = folder.path().join("secret");
    let arguments =
        ["token", "new", "--name", "a", "--admin", "--secret-file", path.to_str().expect("UTF-8")];
    let made = farside(arguments).done();
    assert!(!made.text().contains("farside_"), "{}", made.text());
    assert_eq!(std::fs::metadata(&path).expect("the secret").permissions().mode() & 0o777, 0o600);
    farside(arguments).refused("name another new file");
}

#[test]
fn each_token_grants_its_rights_and_no_others() {
    for scheme in ["tcp", "udp"] {
        let node = Guarded::start(scheme);
        node.run_as("web", &["kv", "put", "k", "v"]).done();
        for name in ["web", "reader", "root"] {
            assert_eq!(node.run_as(name, &["kv", "get", "k"]).done().out, b"v", "{name} by {scheme}");
        }
        for refused in [&["kv", "put", "k", "w"][..], &["kv", "del", "k"]] {
            node.run_as("reader", refused).refused("put and delete need 'read', 'atomic' and 'allocate'");
        }
        assert_eq!(
            node.run_as("reader", &["kv", "get", "k"]).done().out,
            b"v",
            "a refused command changed it"
        );
        node.run_as("reader", &["kv", "stat"]).done();

        // Only admins create stores. A token sees only the stores that it has rights to.
        for name in ["web", "reader", "other"] {
            node.run_as(name, &["store", "create", "s", "--quota", "2MiB"]).refused("admin rights");
            node.run_as(name, &["store", "drop", "default"]).refused("admin rights");
        }
        let none = node.run_as("other", &["kv", "get", "k"]).refused("there is no store 'default'");
        assert!(none.err.contains("it may open another"), "{}", none.err);
        let none =
            node.run_as("other", &["kv", "get", "k", "--store", "another"]).refused("no store 'another'");
        assert!(!none.err.contains("default"), "a store without rights is named: {}", none.err);
        node.run_as("root", &["store", "create", "another", "--quota", "2MiB"]).done();
        node.run_as("other", &["kv", "put", "k", "theirs", "--store", "another"]).done();
        node.run_as("web", &["kv", "get", "k", "--store", "another"]).refused("there is no store 'another'");
        let listed = |name: &str| {
            let listed = node.run_as(name, &["store", "list"]).done();
            listed
                .text()
                .lines()
                .map(|line| line.split('\t').next().unwrap_or("").to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(listed("root"), ["another", "default"]);
        assert_eq!(
            (&listed("other")[..], &listed("reader")[..]),
            (&["another".into()][..], &["default".into()][..])
        );

        // Information on the node's host is reported to admins only.
        let info = node.run_as("root", &["info", "--json"]).done().json();
        assert_eq!(info["pid"], node.node.pid());
        let number = |count: &serde_json::Value| count.as_u64().expect("a number");
        until("refusals are counted", || {
            let info = node.run_as("root", &["info", "--json"]).done().json();
            number(&info["refusals"]["asks"]) >= 6 && number(&info["refusals"]["chains"]) >= 2
        });
        let info = node.run_as("web", &["info", "--json"]).done().json();
        assert_eq!((&info["pid"], &info["listening"]), (&0.into(), &serde_json::json!([])));
        assert_eq!(info["refusals"]["wrong_keys"], 0, "a missing right counts as a guessed key");
    }
}

#[test]
fn missing_and_wrong_tokens_are_refused_and_guessing_locks_out() {
    let node = Guarded::start("tcp");
    farside(["info", "--pool", &node.url]).refused("asks for a token").refused("--token-file");
    private(node.folder.path(), "wrong", "farside_0000");
    let mut guesses = 0;
    // A refusal does not depend on how close the guess was. In the end the address is locked out, for valid tokens too.
    until("the address is locked out", || {
        let ran = node.run_as("wrong", &["info"]).refused("farside: ");
        let is_locked = ran.err.contains("try again in");
        assert!(is_locked || ran.err.contains("does not know this token"), "{}", ran.err);
        assert!(guesses >= 8 || !is_locked, "locked out after only {guesses} guesses");
        guesses += 1;
        let ran = node.run_as("root", &["info"]);
        assert!(guesses >= 8 || ran.code == Some(0), "after {guesses} guesses: {}", ran.err);
        ran.err.contains("try again in")
    });
    until("the lock-out is over", || node.run_as("root", &["info"]).code == Some(0));
    let info = node.run_as("root", &["info", "--json"]).done().json();
    assert!(info["refusals"]["bad_tokens"].as_u64() >= Some(9), "{info}");
    assert!(info["refusals"]["locked_out"].as_u64() >= Some(1), "{info}");
    assert!(node.run_as("root", &["info"]).done().text().contains("unknown tokens"));
    assert!(node.node.log().contains("its greetings are rejected for 10 s"), "{}", node.node.log());
    assert!(!node.node.log().contains("farside_"), "a secret is in the log: {}", node.node.log());
}

#[test]
fn metrics_count_what_engines_refuse() {
    let node = Guarded::with("tcp", &["--admin", "127.0.0.1:0"]);
    let line = node.node.line();
    let at =
        line.split_once("http://").and_then(|(_, rest)| rest.split_once('/')).expect("a url").0.to_owned();
    farside(["info", "--pool", &node.url]).refused("asks for a token");
    node.run_as("reader", &["store", "drop", "default"]).refused("admin rights");
    node.run_as("web", &["kv", "put", "k", "v"]).done();
    node.run_as("reader", &["kv", "del", "k"]).refused("'allocate'");
    let metrics = || answer_to(&at, "GET /metrics HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n");
    let expected = [
        "farside_engine_bad_tokens_total 1",
        "farside_engine_locked_out_total 0",
        "farside_engine_bad_secrets_total 0",
        "farside_engine_wrong_keys_total 0",
        "farside_engine_refused_chains_total 1",
        "farside_engine_refused_asks_total 1",
        "farside_engine_sessions 0",
    ];
    let mut shown = String::new();
    until("the refusals are counted", || {
        shown = metrics();
        expected.iter().all(|expected| shown.lines().any(|line| line == *expected))
    });
}

#[test]
fn revoking_a_token_affects_its_open_sessions() {
    for scheme in ["tcp", "udp"] {
        let node = Guarded::start(scheme);
        let connect = |name: &str| {
            let token = farside::config::read_token(&node.path(name)).expect("a token");
            let options = farside::Options { token: Some(token), ..farside::Options::default() };
            let shown = format!("{options:?}");
            assert!(!shown.contains("farside_"), "{shown}");
            farside::connect_with(&node.url, &options).expect("the token is valid")
        };
        let (web, root) = (connect("web"), connect("root"));
        let (web, root) = (web.open("default").expect("its store"), root.open("default").expect("a store"));
        web.put("k", "v").wait().expect("it has the right");
        let working = web.clone();
        let worker = std::thread::spawn(move || {
            let deadline = Instant::now() + PATIENCE;
            for number in 0_u64.. {
                if let Err(error) = working.put("k", number.to_string()).wait() {
                    return (number, error);
                }
                assert!(Instant::now() < deadline, "none of {number} puts was refused");
            }
            unreachable!("the loop ends with an error")
        });
        // Fewer rights: its puts are refused from now on, and its session stays open.
        node.reload(|name| Some(if name == "root" { "'*' = 'all'" } else { "default = ['read']" }));
        let (put, error) = worker.join().expect("it was refused");
        assert!(error.to_string().contains("need 'read', 'atomic'"), "{error}");
        assert_eq!(error.ran(), farside::Ran::No);
        if put > 0 {
            let last = web.get("k").wait().expect("it may read").expect("it was put");
            assert_eq!(last.value, (put - 1).to_string().into_bytes(), "an earlier put is lost");
        }
        // All rights again: the same session may put.
        node.reload(|name| Some(if name == "root" { "'*' = 'all'" } else { "default = ['all']" }));
        until("it may put again", || web.put("k", "again").wait().is_ok());
        // The token is removed: its session ends, and it cannot open another.
        node.reload(|name| (name == "root").then_some("'*' = 'all'"));
        let mut error = None;
        until("its session has ended", || {
            error = web.get("k").wait().err();
            error.is_some()
        });
        let error = error.expect("it was refused");
        let reported = error.to_string();
        // The second message comes if the client had noticed the end already and tried to open another session.
        assert!(
            reported.contains("it has ended the session") || reported.contains("does not know this token"),
            "{reported}"
        );
        node.run_as("web", &["info"]).refused("does not know this token");
        assert_eq!(
            root.get("k").wait().expect("another token's session").expect("it was put").value,
            b"again"
        );
        // A malformed file leaves the tokens unchanged.
        std::fs::write(node.path("tokens.toml"), "[[token").expect("it is writable");
        node.node.signal(Signal::HUP);
        until("the file is refused", || node.node.log().contains("stay in force"));
        root.put("k", "still").wait().expect("it has the right");
        drop((web, root));
    }
}

#[test]
fn a_node_is_open_to_other_machines_only_with_tokens() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    let tokens = private(folder.path(), "tokens.toml", &entry(folder.path(), "a", &["--admin"]));
    let tokens = tokens.to_str().expect("UTF-8");
    let socket = path("node.sock");
    for open in ["tcp://0.0.0.0:0", "udp://0.0.0.0:0", "tcp://[::]:0"] {
        farside(["serve", "--memory", "8MiB", "--socket", &socket, "--listen", open])
            .refused("open to other machines")
            .refused("--tokens");
    }
    let udp = ["serve", "--memory", "8MiB", "--listen", "udp://0.0.0.0:0", "--tokens", tokens];
    let node = alone(&[&udp[1..], &["--insecure-udp"]].concat(), folder.path().join("clear"));
    node.line();
    assert!(node.log().contains("not sealed"), "{}", node.log());
    for scheme in ["tcp", "udp"] {
        let listen = format!("{scheme}://0.0.0.0:0");
        let arguments = ["--memory", "8MiB", "--listen", &listen, "--tokens", tokens];
        let node = alone(&arguments, folder.path().join(scheme));
        node.line();
        let port = node.line().rsplit(':').next().expect("a port").to_owned();
        let url = format!("{scheme}://127.0.0.1:{port}");
        farside(["info", "--pool", &url]).refused("asks for a token");
        farside(["info", "--pool", &url, "--token-file", &path("a")]).done();
        assert!(!node.log().contains("not sealed"), "{}", node.log());
        assert_eq!(node.log().contains("nothing is encrypted"), scheme == "tcp", "{}", node.log());
    }
    farside(["tls", "new", "--host", "127.0.0.1", "--out", &path("tls")]).done();
    let (cert, key) = (path("tls/cert.pem"), path("tls/key.pem"));
    let tls = ["--memory", "8MiB", "--listen", "tls://0.0.0.0:0", "--tokens", tokens];
    let shown = ["--tls-cert", &cert, "--tls-key", &key];
    let node = alone(&[&tls[..], &shown].concat(), folder.path().join("by-tls"));
    node.line();
    assert!(!node.log().contains("WARN"), "{}", node.log());
    let url = node.line().rsplit_once(" at ").expect("a url").1.replace("0.0.0.0", "127.0.0.1");
    let trusting = ["info", "--pool", &url, "--tls-ca", &cert];
    farside(trusting).refused("asks for a token");
    farside([&trusting[..], &["--token-file", &path("a")]].concat()).done();
}

#[test]
fn udp_packets_are_sealed_unless_both_sides_give_the_flag() {
    let sealed = Guarded::start("udp");
    let clear = Guarded::with("udp", &["--insecure-udp"]);
    let open = serve_open();
    private(sealed.folder.path(), "wrong", "farside_0000");
    sealed.run_as("root", &["kv", "put", "k", "v"]).done();
    clear.run_as("root", &["kv", "put", "k", "v", "--insecure-udp"]).done();
    assert_eq!(clear.run_as("root", &["kv", "get", "k", "--insecure-udp"]).done().out, b"v");
    // Every refusal has a remedy. A mismatch of the flag is never resolved silently.
    sealed
        .run_as("root", &["info", "--insecure-udp"])
        .refused("only sealed packets")
        .refused("omit --insecure-udp");
    sealed.run_as("wrong", &["info"]).refused("does not know this token");
    sealed.run_as("wrong", &["info", "--insecure-udp"]).refused("only sealed packets");
    farside(["info", "--pool", &sealed.url]).refused("asks for a token").refused("--token-file");
    clear.run_as("root", &["info"]).refused("no sealed packets").refused("--insecure-udp");
    farside(["info", "--pool", &clear.url]).refused("asks for a token");
    for (url, more, is_served) in [(&open.1, None, false), (&open.1, Some("--insecure-udp"), true)] {
        let mut command = command();
        command
            .env("FARSIDE_POOL", url)
            .env("FARSIDE_TOKEN_FILE", sealed.path("root"))
            .arg("info")
            .args(more);
        let ran = run(command, b"");
        assert_eq!(ran.code == Some(0), is_served, "{}", ran.err);
        assert!(is_served || ran.err.contains("omit the token"), "{}", ran.err);
    }
    farside(["info", "--pool", &open.1]).done();
    // Benchmarks follow the same rules.
    let bench = ["bench", "ycsb", "--workload", "c", "--records", "100", "--fabric", "udp"];
    let (root, other) = (sealed.path("root"), clear.path("root"));
    let with = |node: &Guarded, token: &Path, more: &[&str]| {
        let token = token.to_str().expect("UTF-8");
        farside([&bench, &["--pool", &node.url, "--token-file", token][..], more].concat())
    };
    with(&sealed, &root, &[]).refused("needs a store");
    with(&clear, &other, &["--insecure-udp"]).refused("needs a store");
    with(&clear, &other, &[]).refused("no sealed packets");
    for node in [&sealed, &clear] {
        assert!(!node.node.log().contains("farside_"), "a secret is in the log: {}", node.node.log());
    }
    // The flag requires an address of udp://, and for clients a node.
    farside(["serve", "--insecure-udp"]).refused("--listen");
    farside([&bench[..], &["--insecure-udp"]].concat()).refused("--pool");
}

/// Starts a node that requires no token. Returns the node and its url.
fn serve_open() -> (Process, String) {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    let node =
        serve(&socket, &["--memory", "8MiB", "--listen", "udp://127.0.0.1:0"], folder.path().join("log"));
    node.line();
    let at = node.line();
    let (_, url) = at.split_once(" at ").unwrap_or_else(|| panic!("no url in '{at}'"));
    let url = url.to_owned();
    (node, url)
}

#[test]
fn tokens_turn_shm_off_unless_a_flag_trusts_its_clients() {
    let node = Guarded::start("tcp");
    let file = node.path("tokens.toml");
    let arguments =
        ["serve", "--memory", "8MiB", "--listen", "tcp://127.0.0.1:0", "--socket", "/tmp/unused.sock"];
    let arguments = arguments.into_iter().chain(["--tokens", file.to_str().expect("UTF-8")]);
    farside(arguments).refused("--shm-trusts-all");
    farside(["serve", "--tokens", "/nowhere"]).refused("--listen");
    farside(["serve", "--shm-trusts-all", "--listen", "tcp://127.0.0.1:0"]).refused("--tokens");
    drop(node);
    let node = Guarded::with("tcp", &["--shm-trusts-all"]);
    let shm = format!("shm:{}", node.path("node.sock").display());
    farside(["kv", "put", "k", "v", "--pool", &shm]).done();
    assert_eq!(node.run_as("reader", &["kv", "get", "k"]).done().out, b"v");
}

#[test]
fn a_malformed_file_of_tokens_is_refused_with_the_position() {
    let folder = tempfile::tempdir().expect("a folder");
    let good = entry(folder.path(), "a", &["--store", "default=read"]);
    let with = |text: &str| {
        let file = private(folder.path(), "tokens.toml", text);
        let arguments = ["serve", "--memory", "8MiB", "--listen", "tcp://127.0.0.1:0", "--tokens"];
        farside(arguments.iter().map(AsRef::as_ref).chain([file.as_os_str()]))
    };
    let secret = format!("{}\n\n[[token]]\nname = 'b'\nsecret = 'hunter2'", good.trim_end());
    let hash = good.lines().find_map(|line| line.strip_prefix("sha256 = ")).expect("a hash");
    let wrong = [
        ("[[token", ":1:8", "is not a file of tokens"),
        ("\n[[token]]\nname = 5", ":3:8", "invalid type"),
        (&secret, ":10:1", "unknown field `secret`"),
        (&good.replace("read", "frob"), ":6:", "unknown variant `frob`"),
        (&good.replace(hash, "'abc'"), ":3:", "64 hexadecimal digits"),
        (&good.replace("name = \"a\"", "name = \"a b\""), "", "1 to 64 letters"),
        (&format!("{good}{good}"), "", "two tokens are named 'a'"),
        (&good.replace("\"read\"", ""), "", "no right to the store 'default'"),
        ("tokens = []", ":1:1", "unknown field `tokens`"),
    ];
    for (text, place, reason) in wrong {
        let ran = with(text).refused(reason).refused(&format!("tokens.toml{place}"));
        assert!(!ran.err.contains("hunter2"), "a secret is printed: {}", ran.err);
    }
    // No other user may read or write the file.
    for mode in [0o640, 0o604, 0o620, 0o644] {
        let file = private(folder.path(), "tokens.toml", &good);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).expect("a file of the test");
        let arguments = ["serve", "--memory", "8MiB", "--listen", "tcp://127.0.0.1:0", "--tokens"];
        farside(arguments.iter().map(AsRef::as_ref).chain([file.as_os_str()])).refused("'chmod 600' it");
    }
    let serve = ["serve", "--memory", "8MiB", "--listen", "tcp://127.0.0.1:0", "--tokens"];
    for (none, reason) in [
        ("/nowhere/file", "could not read"),
        ("/dev/null", "not a file of secrets"),
        ("/", "not a file of secrets"),
    ] {
        farside(serve.iter().chain([&none])).refused(reason);
        farside(["info", "--token-file", none]).refused(reason);
    }
    for token in ["", "\n", "two words", "ключ", &"x".repeat(513)] {
        let file = private(folder.path(), "token", token);
        farside(["info".as_ref(), "--token-file".as_ref(), file.as_os_str()]).refused("holds no token");
    }
    let pipe = folder.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).expect("a pipe");
    farside(["info".as_ref(), "--token-file".as_ref(), pipe.as_os_str()]).refused("not a file of secrets");
}

#[test]
fn tokens_without_rights_or_with_invalid_ones_are_not_created() {
    let wrong: [(&[&str], &str); 7] = [
        (&["--name", "a"], "would have no rights"),
        (&["--name", "a b", "--admin"], "1 to 64 letters"),
        (&["--name", "", "--admin"], "1 to 64 letters"),
        (&["--name", "a", "--store", "default"], "default=read,write"),
        (&["--name", "a", "--store", "default="], "`allocate`"),
        (&["--name", "a", "--store", "default=frob"], "`all` grants all rights"),
        (&["--name", "a", "--store", "a/b=read"], "is not a name of a store"),
    ];
    for (arguments, remedy) in wrong {
        farside([&["token", "new"], arguments].concat()).refused(remedy);
    }
}

#[test]
fn a_node_of_several_that_refuses_is_shown_with_its_reason() {
    let (guarded, folder) = (Guarded::start("tcp"), tempfile::tempdir().expect("a folder"));
    let socket = folder.path().join("node.sock");
    let open = serve(&socket, &["--memory", "8MiB"], folder.path().join("log"));
    open.line();
    let pool = format!("shm:{},{}", socket.display(), guarded.url);
    for command in [&["info"][..], &["store", "list"]] {
        let ran = farside([command, &["--pool", &pool]].concat());
        let (code, shown) = (ran.code, String::from_utf8_lossy(&ran.out));
        assert_eq!(code, Some(2));
        assert!(shown.contains("error: ") && shown.contains("token"), "{shown}");
        assert!(!shown.contains("unreachable"), "{shown}");
        assert!(ran.err.contains("1 of 2 nodes did not answer, or refused"), "{}", ran.err);
    }
}
