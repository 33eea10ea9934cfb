//! Starts the rivals' servers, which are found on PATH. A server runs on loopback, without persistence, and ends with
//! this process.
//!
//! Invariant: however this process ends, its servers end too, because a wrapper starts each server with a parent-death
//! signal.
//! Invariant: the first request to a server asks for its process id. Other requests are sent only if that is the id of
//! the process that was started here.

use crate::cli::child;
use crate::cli::files::Folder;
use crate::cli::node::die_with_parent;
use crate::cli::{Done, Failure};
use farside_bench::compare::memcached::Memcached;
use farside_bench::compare::redis::Get;
use farside_bench::compare::{Address, Client, Dialect, Waiting};
use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Maximum time that a started server needs to respond.
const START_MAX: Duration = Duration::from_secs(10);
/// Number of attempts to start a server. An attempt fails if another program has meanwhile taken the free port that was
/// chosen.
const TRIES: u32 = 5;

/// Hidden command that executes a rival's server and makes the system end that server when the starting process ends.
#[derive(clap::Args)]
pub(in crate::cli::bench) struct RivalServer {
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

impl RivalServer {
    pub(in crate::cli::bench) fn run(self) -> Done {
        die_with_parent()?;
        let (program, arguments) = self.command.split_first().expect("clap requires one");
        let error = Command::new(program).args(arguments).exec();
        Err(Failure::Error(format!("could not start {}: {error}", program.display())))
    }
}

/// Returns a command that runs `program` and ends with this process.
pub(super) fn command(program: &Path) -> Result<Command, Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["bench", "rival-server", "--"]).arg(program);
    Ok(command)
}

/// The running server of a rival.
pub(super) struct Server {
    child: child::Server,
    /// TCP address of the server.
    pub(super) address: Address,
    /// Unix socket of the server, if it has one.
    pub(super) socket: Option<Address>,
    pub(super) version: String,
}

impl Server {
    pub(super) fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// Starts Redis without persistence.
    pub(super) fn redis(program: &Path, folder: &Folder) -> Result<Server, Failure> {
        let socket = folder.path().join("redis.sock");
        let log = folder.path().join("redis.log");
        Server::start::<Get>("redis-server", program, &log, Some(&socket), |command, port| {
            command.args([
                "--port",
                &port.to_string(),
                "--bind",
                "127.0.0.1",
                "--save",
                "",
                "--appendonly",
                "no",
            ]);
            command.args(["--daemonize", "no", "--loglevel", "warning", "--unixsocketperm", "700"]);
            command.arg("--unixsocket").arg(&socket).arg("--dir").arg(folder.path());
        })
    }

    /// Starts memcached with one thread, a table for `items` items and `bytes` bytes of memory. Like Farside, it uses
    /// huge pages if the system has them. It refuses a value that does not fit, instead of evicting another one.
    pub(super) fn memcached(
        program: &Path,
        folder: &Folder,
        bytes: u64,
        items: u64,
    ) -> Result<Server, Failure> {
        let log = folder.path().join("memcached.log");
        let megabytes = bytes.div_ceil(1 << 20).to_string();
        let hashpower = format!("hashpower={}", memcached_places(items).ilog2());
        Server::start::<Memcached>("memcached", program, &log, None, |command, port| {
            command.args(["-l", "127.0.0.1", "-U", "0", "-t", "1", "-M", "-R", "1000", "-m", &megabytes]);
            command.args(["-p", &port.to_string(), "-o", &hashpower]);
            // On a system without transparent huge pages, memcached would refuse to start with this flag.
            if Path::new("/sys/kernel/mm/transparent_hugepage/enabled").is_file() {
                command.arg("-L");
            }
            if rustix::process::geteuid().is_root() {
                command.args(["-u", "root"]); // memcached refuses to run as root without this flag.
            }
        })
    }

    fn start<D: Dialect>(
        name: &str,
        program: &Path,
        log: &Path,
        socket: Option<&Path>,
        arguments: impl Fn(&mut Command, u16),
    ) -> Result<Server, Failure> {
        let version = version(program)?;
        let mut said = String::new();
        for _ in 0..TRIES {
            let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
            let output = std::fs::File::create(log)?;
            let mut command = command(program)?;
            arguments(&mut command, port);
            command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
            let child = child::Server::start(&mut command)?;
            let mut server = Server {
                child,
                address: Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
                socket: socket.map(|path| Address::Unix(path.to_owned())),
                version: version.clone(),
            };
            match server.wait::<D>() {
                Ok(()) => return Ok(server),
                Err(reason) => {
                    let is_there = server.child.has_ended()?.is_none();
                    drop(server);
                    said = match std::fs::read(log) {
                        Ok(bytes) => {
                            let text = String::from_utf8_lossy(&bytes);
                            let last: Vec<&str> = text.lines().rev().take(3).collect();
                            let last: Vec<&str> = last.into_iter().rev().collect();
                            format!("{reason}; its last output: {}", last.join(" / "))
                        }
                        Err(error) => format!("{reason}; its output cannot be read: {error}"),
                    };
                    if is_there {
                        break; // A live server that does not respond would not respond at another port either.
                    }
                }
            }
        }
        Err(Failure::Error(format!(
            "could not start {name} ({}): {said}; fix the reason, or omit {name} from --rivals",
            program.display()
        )))
    }

    /// Waits until the server responds, and checks its process id.
    fn wait<D: Dialect>(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + START_MAX;
        let mut last = String::from("it does not listen");
        while Instant::now() < deadline {
            if let Some(status) = self.child.has_ended().map_err(|error| error.to_string())? {
                return Err(format!("it exited with {status}"));
            }
            let connected = Client::<D>::connect(&self.address, Waiting::Asleep, 1);
            match connected.map_err(|error| error.to_string()).and_then(|mut client| client.server_pid()) {
                Ok(pid) if pid == self.child.pid() => return Ok(()),
                Ok(pid) => return Err(format!("process {pid} has taken its port")),
                Err(reason) => last = reason,
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Err(format!("it did not respond within {} s: {last}", START_MAX.as_secs()))
    }
}

/// Returns the number of buckets in memcached's table for `items` items: one for each item, rounded up to a power of
/// two, but at least memcached's default.
fn memcached_places(items: u64) -> u64 {
    items.next_power_of_two().max(1 << 16)
}

/// Returns the size in bytes of memcached's table for `items` items, which has a pointer for each bucket.
pub(super) fn memcached_table(items: u64) -> u64 {
    const PLACE_SIZE: u64 = 8;
    memcached_places(items) * PLACE_SIZE
}

/// Maximum duration of a program's run with `--version`.
const VERSION_MAX: Duration = Duration::from_secs(5);

/// Reads a program's release from the output of `--version`: `Redis server v=7.0.15 sha=...`, `memcached 1.6.18`.
fn version(program: &Path) -> Result<String, Failure> {
    let mut child = command(program)?.arg("--version").stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let deadline = Instant::now() + VERSION_MAX;
    // The output fits into the pipe's buffer, so the child never blocks on it.
    while child.try_wait()?.is_none() {
        if Instant::now() > deadline {
            let _gone = child.kill();
            let _reaped = child.wait();
            return Err(Failure::Error(format!(
                "{} --version did not end within {} s: omit it from --rivals",
                program.display(),
                VERSION_MAX.as_secs()
            )));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let words = text.lines().next().unwrap_or_default().split_whitespace();
    let is_number = |word: &&str| word.trim_start_matches("v=").starts_with(|c: char| c.is_ascii_digit());
    let number = words.into_iter().find(is_number).map(|word| word.trim_start_matches("v=").to_owned());
    number.ok_or_else(|| {
        Failure::Error(format!("{} --version prints no release: omit it from --rivals", program.display()))
    })
}
