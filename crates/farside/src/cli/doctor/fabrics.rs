//! Tries each fabric: starts a node with a store, puts a value, and gets it a thousand times.
//!
//! Invariant: every node that a check starts is stopped, and its files are removed.

use super::check::Check;
use crate::cli::Failure;
use crate::cli::child::Server;
use crate::cli::files::Folder;
use farside::Pool;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// A fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Fabric {
    /// A node in this process
    Local,
    /// A node in another process; clients access its memory
    Shm,
    /// A node in another process; its engine serves rings in shared memory
    Ring,
    /// A node in another process; its engine serves UDP
    Udp,
    /// A node in another process; its engine serves TCP
    Tcp,
    /// A node in another process; its engine serves TLS
    Tls,
    /// A node in another process; an RDMA device carries its chains
    Verbs,
}

impl Fabric {
    pub(super) const ALL: [Fabric; 7] =
        [Fabric::Local, Fabric::Shm, Fabric::Ring, Fabric::Udp, Fabric::Tcp, Fabric::Tls, Fabric::Verbs];

    fn described(self) -> (&'static str, &'static str) {
        match self {
            Fabric::Local => ("fabric.local", "local"),
            Fabric::Shm => ("fabric.shm", "shm"),
            Fabric::Ring => ("fabric.ring", "ring"),
            Fabric::Udp => ("fabric.udp", "udp"),
            Fabric::Tcp => ("fabric.tcp", "tcp"),
            Fabric::Tls => ("fabric.tls", "tls"),
            Fabric::Verbs => ("fabric.verbs", "verbs"),
        }
    }
}

/// Tries a fabric. `is_named`: the user named it, so that an unsupported fabric is a failure instead of a note.
pub(super) fn checks(fabric: Fabric, is_named: bool) -> Vec<Check> {
    let (id, what) = fabric.described();
    let tried = match fabric {
        #[cfg(feature = "verbs")]
        Fabric::Verbs if is_named => return super::verbs::checks(),
        #[cfg(feature = "verbs")]
        Fabric::Verbs => return vec![super::verbs::listed()],
        #[cfg(not(feature = "verbs"))]
        Fabric::Verbs => return vec![not_built(fabric, is_named)],
        Fabric::Tls if !cfg!(feature = "tls") => return vec![not_built(fabric, is_named)],
        Fabric::Local => farside::connect(LOCAL)
            .map_err(|error| error.to_string())
            .and_then(|pool| measure(&pool, "default", Some(VALUE))),
        _ => Node::start(fabric, None).and_then(|node| node.measure()),
    };
    vec![judged(id, what, tried, remedy(fabric))]
}

/// Value that a check puts and gets.
const VALUE: &[u8] = b"a value that is put and got";

const LOCAL: &str = "local:16MiB";

/// Returns a command that reproduces a fabric's failure with the full output of the node.
fn remedy(fabric: Fabric) -> &'static str {
    match fabric {
        Fabric::Local => "farside bench ycsb --fabric local --records 1000   (shows it again)",
        Fabric::Shm => "farside serve --store default   (shows it again)",
        Fabric::Ring => "farside serve --store default --listen ring:PATH   (shows it again)",
        Fabric::Udp => "farside serve --store default --listen udp://127.0.0.1:7460   (shows it again)",
        Fabric::Tcp => "farside serve --store default --listen tcp://127.0.0.1:7460   (shows it again)",
        Fabric::Tls => "farside bench ycsb --fabric tls --records 1000   (shows it again)",
        Fabric::Verbs => "farside serve --store default --listen verbs://DEVICE   (shows it again)",
    }
}

/// Median latency and number of the measured gets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gets {
    pub(super) p50_us: f64,
    pub(super) count: usize,
}

const GETS: usize = 1000;
const GETS_TIME_MAX: Duration = Duration::from_secs(2);

/// Measures the latency of gets of one key: [`GETS`] gets, or as many as [`GETS_TIME_MAX`] allows. If `put` is given,
/// first puts that value; otherwise changes nothing.
pub(super) fn measure(pool: &Pool, store: &str, put: Option<&[u8]>) -> Result<Gets, String> {
    const KEY: &[u8] = b"farside doctor";
    let mut client = farside::local::Client::open(pool, store).map_err(|error| error.to_string())?;
    if let Some(value) = put {
        client.put(KEY, value).map_err(|error| error.to_string())?;
        let found = client.get(KEY).map_err(|error| error.to_string())?;
        if found.as_ref().map(|item| item.value) != Some(value) {
            return Err(
                "a get returned another value than was put: this machine's memory may be defective".into()
            );
        }
    }
    let (began, mut took) = (Instant::now(), Vec::with_capacity(GETS));
    while took.len() < GETS && began.elapsed() < GETS_TIME_MAX {
        let since = Instant::now();
        client.get(KEY).map_err(|error| error.to_string())?;
        took.push(since.elapsed());
    }
    took.sort();
    Ok(Gets { p50_us: took[took.len() / 2].as_nanos() as f64 / 1e3, count: took.len() })
}

/// Describes the median latency and the number of gets in words.
pub(super) fn describe_latency(gets: Gets) -> String {
    format!("a get takes {:.2} us (median of {}, one at a time; a rough figure)", gets.p50_us, gets.count)
}

fn judged(id: &'static str, what: &'static str, tried: Result<Gets, String>, remedy: &'static str) -> Check {
    match tried {
        Ok(gets) => Check { p50_us: Some(gets.p50_us), ..Check::ok(id, what, describe_latency(gets)) },
        Err(reason) => Check::fail(id, what, reason).remedy(remedy),
    }
}

fn not_built(fabric: Fabric, is_named: bool) -> Check {
    let (id, what) = fabric.described();
    let found = format!("this farside was built without {what}");
    let check = if is_named { Check::fail(id, what, found) } else { Check::note(id, what, found) };
    check.remedy(format!("cargo build --release   (the feature '{what}' is on by default)"))
}

/// Tries RDMA on a device of this machine.
#[cfg(feature = "verbs")]
pub(super) fn try_verbs(device: &str) -> Check {
    let (id, what) = Fabric::Verbs.described();
    let tried = Node::start(Fabric::Verbs, Some(device)).and_then(|node| node.measure());
    judged(id, what, tried, remedy(Fabric::Verbs))
}

/// A node in a child process, with its own store and its own folder.
struct Node {
    child: Server,
    url: String,
    options: farside::Options,
    // The folder is declared after the child, so that it is dropped after the child, which uses it.
    _folder: Folder,
}

const START_TIME_MAX: Duration = Duration::from_secs(10);

impl Node {
    /// Starts a node that serves `fabric`, and waits until it serves. RDMA takes the name of a device.
    ///
    /// # Errors
    /// The node does not start. The message is the node's own error message, if it printed one.
    fn start(fabric: Fabric, device: Option<&str>) -> Result<Node, String> {
        let folder = Folder::make("doctor")?;
        let socket = folder.path().join("node.sock");
        let mut command = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
        command.args([
            "serve",
            "--die-with-parent",
            "--memory",
            "16MiB",
            "--pages",
            "small",
            "--store",
            "default",
        ]);
        command.arg("--socket").arg(&socket);
        let options = listen(&mut command, fabric, device, folder.path())?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            Server::start(&mut command).map_err(|error| format!("could not start a node: {error}"))?;
        let lines = lines_of(child.stdout().take());
        let log = lines_of(child.stderr().take());
        let mut node = Node { child, url: format!("shm:{}", socket.display()), options, _folder: folder };
        let deadline = Instant::now() + START_TIME_MAX;
        let next = || lines.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        let mut line = next();
        if line.is_ok() && fabric != Fabric::Shm {
            // The second line is "farside: an engine serves at URL".
            line = next();
            let url = line.as_ref().ok().and_then(|line| line.trim().rsplit_once(" at "));
            node.url = url.map_or_else(String::new, |(_, url)| url.to_owned());
        }
        line.map_err(|why| node.failure_reason(why, &log))?;
        Ok(node)
    }

    fn measure(&self) -> Result<Gets, String> {
        let pool = farside::connect_with(&self.url, &self.options).map_err(|error| error.to_string())?;
        measure(&pool, "default", Some(VALUE))
    }

    /// Returns the reason why the node does not serve.
    fn failure_reason(&mut self, why: mpsc::RecvTimeoutError, log: &mpsc::Receiver<String>) -> String {
        let status = match why {
            mpsc::RecvTimeoutError::Timeout => self.child.end(),
            mpsc::RecvTimeoutError::Disconnected => self.child.wait(),
        };
        // The process has ended, so its output is complete. The last line with the program's name has the reason.
        let log: Vec<String> = log.iter().collect();
        let reason = log.iter().rev().find_map(|line| line.strip_prefix("farside: "));
        match (reason, status) {
            (Some(reason), _) => reason.trim().to_owned(),
            (None, Ok(status)) if why == mpsc::RecvTimeoutError::Disconnected => {
                format!("the node exited before it served ({status})")
            }
            _ => format!("the node did not serve within {} s", START_TIME_MAX.as_secs()),
        }
    }
}

/// Adds the arguments that serve a fabric to the node's command. Returns the options with which a client connects.
fn listen(
    command: &mut Command,
    fabric: Fabric,
    device: Option<&str>,
    folder: &Path,
) -> Result<farside::Options, String> {
    let at = match fabric {
        Fabric::Udp => "udp://127.0.0.1:0".into(),
        Fabric::Tcp => "tcp://127.0.0.1:0".into(),
        Fabric::Tls => "tls://127.0.0.1:0".into(),
        Fabric::Ring => format!("ring:{}", folder.join("ring").display()),
        Fabric::Verbs => format!("verbs://{}:0?host=127.0.0.1", device.unwrap_or_default()),
        Fabric::Local | Fabric::Shm => return Ok(farside::Options::default()),
    };
    command.args(["--listen", &at]);
    #[cfg(feature = "tls")]
    if fabric == Fabric::Tls {
        let made = crate::cli::tls::Certificate::new(&["127.0.0.1".into()], 1)?;
        let [shown, key] = ["cert.pem", "key.pem"].map(|name| folder.join(name));
        made.write(&shown, &key)?;
        command.arg("--tls-cert").arg(shown).arg("--tls-key").arg(key);
        return Ok(farside::Options { tls_ca: Some(made.text), ..farside::Options::default() });
    }
    Ok(farside::Options::default())
}

/// Starts a thread that reads a child's output line by line. The channel closes when the child ends. If the receiver is
/// dropped, the thread reads on, so that the child never blocks.
fn lines_of(output: Option<impl Read + Send + 'static>) -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel();
    if let Some(output) = output {
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let _receiver_may_be_gone = sender.send(line);
            }
        });
    }
    lines
}

/// Handles SIGXFSZ, so that a write beyond the limit on file sizes fails instead of ending this process.
pub(super) fn handle_file_size_limit() -> Result<(), Failure> {
    let flag = std::sync::Arc::default();
    signal_hook::flag::register(signal_hook::consts::SIGXFSZ, flag)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict::*;
    use super::super::tests::is;
    use super::*;

    #[test]
    fn a_working_fabric_has_a_latency_and_a_failing_one_a_reason() {
        let check =
            judged("fabric.shm", "shm", Result::Ok(Gets { p50_us: 0.414, count: 1000 }), "see it again");
        is(&check, Ok, "0.41 us (median of 1000", "");
        assert_eq!(check.p50_us, Some(0.414));
        is(&judged("a", "b", Err("no memory".into()), "see it again"), Fail, "no memory", "see it again");
    }

    #[test]
    fn a_fabric_that_was_not_built_fails_only_if_the_user_named_it() {
        is(&not_built(Fabric::Verbs, true), Fail, "built without verbs", "the feature 'verbs'");
        is(&not_built(Fabric::Tls, false), Note, "built without tls", "the feature 'tls'");
    }

    #[test]
    fn a_local_node_is_measured_and_returns_the_put_value() {
        let pool = farside::connect(LOCAL).expect("a node");
        let gets = measure(&pool, "default", Some(b"v")).expect("it works");
        assert!(gets.p50_us > 0.0 && gets.count > 0);
        let absent = measure(&pool, "none", None).expect_err("there is no such store");
        assert!(absent.contains("none"), "{absent}");
    }
}
