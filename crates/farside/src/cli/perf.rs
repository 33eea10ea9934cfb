//! `perf`: measures single ops, chains and calls, with the flags and the output of perftest.
//!
//! Invariant: invalid arguments are refused before any measurement. Standard output is empty until the first result.

mod place;
mod report;
mod work;

use super::{Done, Failure, duration, progress};
use clap::ValueEnum;
use farside_fabrics::executor::TASKS_MAX;
use farside_systems::raw::{ECHO_MAX, PUT_MAX, READ_MAX, WRITE_MAX};
use place::{Device, Place, Server};
use report::{Format, Report};
use std::path::PathBuf;
use std::time::Duration;
use work::{Request, Until, Worker};

/// Measure the latency or the rate of single ops, chains and calls, as perftest does.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
#[command(allow_negative_numbers = true)] // Each flag's own parser then rejects a negative number.
pub(super) struct Perf {
    /// Test to run: *_lat has one request in flight, *_bw has --tx-depth requests in flight
    #[arg(value_enum)]
    test: Test,
    /// Host on which 'farside perf' serves; if omitted, this command is the server
    #[arg(value_name = "HOST")]
    host: Option<String>,
    /// Bytes of each request [default: 2 for *_lat, 32768 for *_bw, 8 for atomics]
    #[arg(short, long, value_name = "BYTES", value_parser = size)]
    size: Option<u64>,
    /// Measure every power of two from 2 bytes to the largest size that fits
    #[arg(short, long, conflicts_with = "size")]
    all: bool,
    /// Number of measured requests [default: 1000 for *_lat, 5000 for *_bw]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(5..=100_000_000))]
    iters: Option<u64>,
    /// Time to measure each size, instead of --iters: 10, 10s or 500ms
    #[arg(short = 'D', long, value_name = "SECONDS", conflicts_with = "iters", value_parser = lasting)]
    duration: Option<Duration>,
    /// Requests in flight of a *_bw test [default: 64, the maximum of one client core]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=TASKS_MAX as i64))]
    tx_depth: Option<u32>,
    /// Kind of atomic [default: faa]
    #[arg(short = 'A', long = "atomic_type", visible_alias = "op", value_enum, value_name = "TYPE")]
    atomic_type: Option<Atomic>,
    /// Kind of chain [default: get]
    #[arg(long, value_enum)]
    chain: Option<ChainArg>,
    /// Server's port, for both tcp and udp [default: 18515]
    #[arg(short, long)]
    port: Option<u16>,
    /// Transport between server and client, instead of a device: tcp or udp [default: tcp; the server serves both]
    #[arg(short = 'd', long = "ib-dev", visible_alias = "device", value_name = "CARRIER", value_parser = place::device)]
    device: Option<Device>,
    /// Start a node on this host, and measure it over this fabric
    #[arg(long, value_enum, conflicts_with_all = ["host", "pool", "port", "device"])]
    fabric: Option<super::bench::FabricArg>,
    /// Measure this node, which need not be a perf server: creates a store on it, and drops it at the end
    #[arg(long, value_name = "URL", conflicts_with_all = ["host", "port", "device"])]
    pool: Option<String>,
    /// Address of this machine to serve on
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["host", "pool", "fabric"])]
    bind: Option<std::net::IpAddr>,
    /// File with the tokens of allowed clients ('farside token new' makes its entries). Required if other machines can
    /// reach the server
    #[arg(long, value_name = "PATH", conflicts_with_all = ["host", "pool", "fabric"])]
    tokens: Option<PathBuf>,
    /// File with the token for the server or node, if it requires one [default: FARSIDE_TOKEN_FILE, else the settings
    /// file, else none]
    #[arg(long, value_name = "PATH", conflicts_with = "fabric")]
    token_file: Option<String>,
    /// File of certificates to verify the node; only for --pool tls:// [default: FARSIDE_TLS_CA, else the settings
    /// file, else none]
    #[arg(long, value_name = "PATH", requires = "pool")]
    tls_ca: Option<String>,
    /// Send udp packets unencrypted despite the tokens; give this flag to the server and to its clients
    #[arg(long, conflicts_with = "fabric")]
    insecure_udp: bool,
    /// Report bandwidth in 10^9 bits a second, instead of 2^20 bytes a second
    #[arg(long = "report_gbits")]
    report_gbits: bool,
    /// Print one JSON object for each size, instead of the table
    #[arg(long)]
    json: bool,
    /// Also write the result to a JSON file: perftest_out.json, or the file of --out_json_file
    #[arg(long = "out_json")]
    out_json: bool,
    /// File for the JSON result; implies --out_json
    #[arg(long = "out_json_file", value_name = "PATH")]
    out_json_file: Option<PathBuf>,
    /// Flag of perftest, not supported
    #[arg(short = 'b', long = "bidirectional", hide = true)]
    bidirectional: bool,
    /// Flag of perftest, not supported
    #[arg(short = 'x', long = "gid-index", hide = true, value_name = "INDEX", allow_hyphen_values = true)]
    gid_index: Option<String>,
}

const AFTER_HELP: &str = "\
Every latency is a full round trip: it ends when the client knows that the request is done. (perftest's read_lat and \
atomic_lat are round trips too; its write_lat and send_lat are half of a ping-pong, so double these to compare.)

One host:   farside perf read_lat --fabric shm
Two hosts:  farside perf read_lat          and, on the other,  farside perf read_lat HOST";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Test {
    /// READ: latency
    ReadLat,
    /// WRITE, acknowledged
    WriteLat,
    /// CAS or FETCH-ADD
    AtomicLat,
    /// Several ops in one request
    ChainLat,
    /// Call to the node's CPU, which returns the bytes of the request
    CallLat,
    /// READ: rate
    ReadBw,
    /// WRITE, acknowledged
    WriteBw,
    /// CAS or FETCH-ADD
    AtomicBw,
    /// Several ops in one request
    ChainBw,
    /// Call to the node's CPU, which returns the bytes of the request
    CallBw,
}

/// Kind of atomic; accepts perftest's names too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Atomic {
    /// FETCH-ADD of 8 bytes, perftest's default
    #[value(name = "faa", alias = "FETCH_AND_ADD")]
    FetchAdd,
    /// CAS of 8 or 16 bytes, which always swaps
    #[value(name = "cas", alias = "CMP_AND_SWAP")]
    Cas,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ChainArg {
    /// READ a pointer, then READ what it points to
    Get,
    /// WRITE the bound, ALLOCATE, CAS the pointer, READ it: PRISM-KV's PUT without its probe
    Put,
}

impl Perf {
    pub(super) fn run(self) -> Done {
        self.refuse_unsupported()?;
        if self.host.is_none() && self.pool.is_none() && self.fabric.is_none() {
            return self.serve();
        }
        let request = self.request()?;
        let sizes = self.sizes(request)?;
        let depth = self.depth()?;
        if self.report_gbits && self.test.is_latency() {
            return refuse("--report_gbits applies to bandwidth: omit it, or name a *_bw test");
        }
        let file = self.json_file();
        let place = self.place(request)?;
        if let Some(path) = &file {
            report::check_writable(path)?;
        }
        let format = Format { gbits: self.report_gbits, json: self.json };
        let mut report = Report::new(format, &place, self.name(), request, depth, self.until());
        let bar = progress("measuring", sizes.len() as u64, false);
        let mut worker = Worker::open(&place.pool, &place.store, request, depth)?;
        for size in sizes {
            worker.prepare(size)?;
            let row = match depth {
                None => report::Row::Latency(worker.latency(self.until())?),
                Some(_) => report::Row::Bandwidth(worker.bandwidth(self.until())?),
            };
            worker.check()?;
            bar.inc(1);
            bar.suspend(|| report.print(size, &row))?;
        }
        bar.finish_and_clear();
        report.end()?;
        file.map_or(Ok(()), |path| report.write(&path))
    }

    fn serve(&self) -> Done {
        if self.token_file.is_some() {
            return refuse(
                "--token-file is for clients: name a HOST, or list the server's clients with --tokens",
            );
        }
        if self.json {
            return refuse("--json is for the measuring side: name a HOST, or omit --json");
        }
        let has_client_flags = self.size.is_some()
            || self.all
            || self.iters.is_some()
            || self.duration.is_some()
            || self.tx_depth.is_some()
            || self.atomic_type.is_some()
            || self.chain.is_some()
            || self.report_gbits
            || self.json_file().is_some();
        if has_client_flags {
            note!(
                "farside: the client alone decides what to measure and how to report it: such flags have no effect here"
            );
        }
        Server {
            name: self.name(),
            bind: self.bind.unwrap_or(std::net::Ipv4Addr::LOCALHOST.into()),
            port: self.port.unwrap_or(place::PORT),
            device: self.device,
            tokens: self.tokens.clone(),
            insecure_udp: self.insecure_udp,
        }
        .serve()
    }

    fn place(&self, request: Request) -> Result<Place, Failure> {
        let settings = farside::config::File {
            pool: self.pool.clone(),
            token_file: self.token_file.clone(),
            tls_ca: self.tls_ca.clone(),
            ..farside::config::File::default()
        };
        match (&self.host, self.fabric) {
            (Some(host), _) => Place::at_host(
                host,
                self.port.unwrap_or(place::PORT),
                self.device.unwrap_or(Device::Tcp),
                &self.name(),
                settings,
                self.insecure_udp,
            ),
            (None, Some(fabric)) => Place::started(fabric),
            (None, None) => Place::on_pool(settings, self.insecure_udp, request == Request::Put),
        }
    }

    /// Refuses flags of perftest that Farside cannot support.
    fn refuse_unsupported(&self) -> Done {
        if self.bidirectional {
            return refuse(
                "-b lets both sides send requests, but a node sends none: omit it, or run a second client at the same \
                 time for the other direction",
            );
        }
        if self.gid_index.is_some() {
            return refuse(
                "-x selects an address of an RDMA device, which no fabric uses: omit it; HOST is the name or address \
                 that the server's --bind selects",
            );
        }
        Ok(())
    }

    fn request(&self) -> Result<Request, Failure> {
        let kind = self.test.kind();
        if kind != Verb::Atomic && self.atomic_type.is_some() {
            return refuse("--atomic_type applies to atomic_lat and atomic_bw: omit it, or name one of them");
        }
        if kind != Verb::Chain && self.chain.is_some() {
            return refuse("--chain applies to chain_lat and chain_bw: omit it, or name one of them");
        }
        Ok(match (kind, self.atomic_type, self.chain) {
            (Verb::Read, ..) => Request::Read,
            (Verb::Write, ..) => Request::Write,
            (Verb::Atomic, Some(Atomic::Cas), _) => Request::Cas,
            (Verb::Atomic, ..) => Request::FetchAdd,
            (Verb::Chain, _, Some(ChainArg::Put)) => Request::Put,
            (Verb::Chain, ..) => Request::Get,
            (Verb::Call, ..) => Request::Call,
        })
    }

    fn sizes(&self, request: Request) -> Result<Vec<usize>, Failure> {
        let max = match request {
            Request::Read => READ_MAX,
            Request::Write => WRITE_MAX,
            // A GET reads a value that a PUT has stored, so both have the same maximum.
            Request::Get | Request::Put => PUT_MAX,
            Request::Call => ECHO_MAX,
            Request::Cas | Request::FetchAdd => {
                let (words, which) = match request {
                    Request::Cas => (&[8, 16][..], "8 or 16"),
                    _ => (&[8][..], "8"),
                };
                if self.all {
                    return refuse(&format!("this atomic has {which} bytes and no other sizes: omit --all"));
                }
                let size = self.size.unwrap_or(8);
                return match words.iter().find(|&&word| word as u64 == size) {
                    Some(&word) => Ok(vec![word]),
                    None => refuse(&format!("this atomic has {which} bytes, not {size}: omit --size")),
                };
            }
        };
        if self.all {
            return Ok((1..usize::BITS).map(|bit| 1 << bit).take_while(|&size| size <= max).collect());
        }
        let default = if self.test.is_latency() { 2 } else { 1 << 15 };
        match self.size.unwrap_or(default) {
            size if size <= max as u64 => Ok(vec![size as usize]),
            size => refuse(&format!(
                "{size} bytes do not fit into one request of {}, which carries {max} at most: give a smaller --size",
                self.name()
            )),
        }
    }

    /// Returns the number of requests in flight of a bandwidth test, or `None` for a latency test.
    fn depth(&self) -> Result<Option<u32>, Failure> {
        match (self.test.is_latency(), self.tx_depth) {
            (true, None) => Ok(None),
            (true, Some(_)) => {
                refuse("a *_lat test has one request in flight: omit --tx-depth, or name a *_bw test")
            }
            (false, depth) => Ok(Some(depth.unwrap_or(TASKS_MAX as u32))),
        }
    }

    fn until(&self) -> Until {
        let iterations = if self.test.is_latency() { 1000 } else { 5000 };
        match self.duration {
            Some(duration) => Until::Time(duration),
            None => Until::Iterations(self.iters.unwrap_or(iterations)),
        }
    }

    fn json_file(&self) -> Option<PathBuf> {
        let default = || self.out_json.then(|| PathBuf::from("perftest_out.json"));
        self.out_json_file.clone().or_else(default)
    }

    /// Returns the name of the test, as on the command line.
    fn name(&self) -> String {
        self.test.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verb {
    Read,
    Write,
    Atomic,
    Chain,
    Call,
}

impl Test {
    fn kind(self) -> Verb {
        match self {
            Test::ReadLat | Test::ReadBw => Verb::Read,
            Test::WriteLat | Test::WriteBw => Verb::Write,
            Test::AtomicLat | Test::AtomicBw => Verb::Atomic,
            Test::ChainLat | Test::ChainBw => Verb::Chain,
            Test::CallLat | Test::CallBw => Verb::Call,
        }
    }

    fn is_latency(self) -> bool {
        matches!(self, Test::ReadLat | Test::WriteLat | Test::AtomicLat | Test::ChainLat | Test::CallLat)
    }
}

fn refuse<T>(reason: &str) -> Result<T, Failure> {
    Err(Failure::Error(reason.to_owned()))
}

/// Parses, for clap, the size of a request in bytes.
pub(super) fn size(text: &str) -> Result<u64, String> {
    match farside::config::parse_bytes(text)? {
        0 => Err("a request of 0 bytes cannot be measured: give 1 or more".into()),
        bytes => Ok(bytes),
    }
}

/// Parses, for clap, the duration of a measurement.
pub(super) fn lasting(text: &str) -> Result<Duration, String> {
    let duration = duration(text)?;
    let possible = Duration::from_millis(10)..=Duration::from_secs(1_000_000);
    if possible.contains(&duration) {
        Ok(duration)
    } else {
        Err(format!("'{text}' is too short or too long to measure for: give 10ms to 1000000s"))
    }
}
