//! `perf`: what an op, a chain and a call cost by themselves, asked and told as perftest does.
//!
//! Invariant: whatever can be refused is refused before anything is measured; and nothing is on standard output before
//! the first result.

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

/// Time single ops, chains and calls, or count how many there are a second.
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
#[command(allow_negative_numbers = true)] // So that one is refused by what it is for.
pub(super) struct Perf {
    /// What to measure: *_lat one request at a time, *_bw --tx-depth of them at once
    #[arg(value_enum)]
    test: Test,
    /// The host where 'farside perf' serves; if left out, serve
    #[arg(value_name = "HOST")]
    host: Option<String>,
    /// Bytes of each request [default: 2 of a *_lat, 32768 of a *_bw; of atomics 8]
    #[arg(short, long, value_name = "BYTES", value_parser = size)]
    size: Option<u64>,
    /// Measure every power of two from 2 bytes to the most that fits
    #[arg(short, long, conflicts_with = "size")]
    all: bool,
    /// How many requests are measured [default: 1000 of a *_lat, 5000 of a *_bw]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(5..=100_000_000))]
    iters: Option<u64>,
    /// Measure each size for so long, in place of --iters: 10, 10s or 500ms
    #[arg(short = 'D', long, value_name = "SECONDS", conflicts_with = "iters", value_parser = lasting)]
    duration: Option<Duration>,
    /// Requests under way at once, of a *_bw [default: 64, the most that one client core has]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=TASKS_MAX as i64))]
    tx_depth: Option<u32>,
    /// What an atomic does [default: faa]
    #[arg(short = 'A', long = "atomic_type", visible_alias = "op", value_enum, value_name = "TYPE")]
    atomic_type: Option<Atomic>,
    /// What a chain does [default: get]
    #[arg(long, value_enum)]
    chain: Option<ChainArg>,
    /// The server's port, of tcp and of udp alike [default: 18515]
    #[arg(short, long)]
    port: Option<u16>,
    /// What carries requests between server and client, in place of a device: tcp or udp [default: tcp; the server
    /// serves both]
    #[arg(short = 'd', long = "ib-dev", visible_alias = "device", value_name = "CARRIER", value_parser = place::device)]
    device: Option<Device>,
    /// Start the node as well, on this host, and reach it so
    #[arg(long, value_enum, conflicts_with_all = ["host", "pool", "port", "device"])]
    fabric: Option<super::bench::FabricArg>,
    /// Measure this node, which need not be a perf server: a store is made on it, and dropped at the end
    #[arg(long, value_name = "URL", conflicts_with_all = ["host", "port", "device"])]
    pool: Option<String>,
    /// Where to serve: an address of this machine
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["host", "pool", "fabric"])]
    bind: Option<std::net::IpAddr>,
    /// Whom to serve: a file of tokens ('farside token new' makes entries for it). Required where other machines can
    /// reach the server
    #[arg(long, value_name = "PATH", conflicts_with_all = ["host", "pool", "fabric"])]
    tokens: Option<PathBuf>,
    /// A file with the token that the server or node is shown, if it asks for one [default: FARSIDE_TOKEN_FILE, the
    /// settings file, or none]
    #[arg(long, value_name = "PATH", conflicts_with = "fabric")]
    token_file: Option<String>,
    /// A file of certificates, for --pool tls:// alone [default: FARSIDE_TLS_CA, the settings file, or none]
    #[arg(long, value_name = "PATH", requires = "pool")]
    tls_ca: Option<String>,
    /// Leave packets of udp in the clear although there are tokens: at the server, and at its clients
    #[arg(long, conflicts_with = "fabric")]
    insecure_udp: bool,
    /// Bandwidth in 10^9 bits a second, in place of 2^20 bytes
    #[arg(long = "report_gbits")]
    report_gbits: bool,
    /// The result as one JSON object for each size, in place of the table
    #[arg(long)]
    json: bool,
    /// Also write the result to a file, as JSON: perftest_out.json, unless --out_json_file names another
    #[arg(long = "out_json")]
    out_json: bool,
    /// The file of --out_json, which this implies
    #[arg(long = "out_json_file", value_name = "PATH")]
    out_json_file: Option<PathBuf>,
    /// Of perftest; refused, with a reason
    #[arg(short = 'b', long = "bidirectional", hide = true)]
    bidirectional: bool,
    /// Of perftest; refused, with a reason
    #[arg(short = 'x', long = "gid-index", hide = true, value_name = "INDEX", allow_hyphen_values = true)]
    gid_index: Option<String>,
}

const AFTER_HELP: &str = "\
A latency is that of a full round trip, of every test: whoever asked knows then that it is done. (perftest's read_lat \
and atomic_lat are that too; its write_lat and send_lat are half of a ping-pong, so compare twice those.)

One host:   farside perf read_lat --fabric shm
Two hosts:  farside perf read_lat          and, on the other,  farside perf read_lat HOST";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Test {
    /// READ: how long one takes
    ReadLat,
    /// WRITE, acknowledged
    WriteLat,
    /// CAS or FETCH-ADD
    AtomicLat,
    /// Several ops in one request
    ChainLat,
    /// The node's CPU answers with what it was asked
    CallLat,
    /// READ: how many a second
    ReadBw,
    /// WRITE, acknowledged
    WriteBw,
    /// CAS or FETCH-ADD
    AtomicBw,
    /// Several ops in one request
    ChainBw,
    /// The node's CPU answers with what it was asked
    CallBw,
}

/// perftest's names are taken, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Atomic {
    /// FETCH-ADD of 8 bytes, as perftest does if left out
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
        self.refuse_what_is_not_here()?;
        if self.host.is_none() && self.pool.is_none() && self.fabric.is_none() {
            return self.serve();
        }
        let request = self.request()?;
        let sizes = self.sizes(request)?;
        let depth = self.depth()?;
        if self.report_gbits && self.test.is_latency() {
            return told("--report_gbits is of bandwidth: leave it out, or name a *_bw test");
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
            bar.suspend(|| report.tell(size, &row))?;
        }
        bar.finish_and_clear();
        report.end()?;
        file.map_or(Ok(()), |path| report.write(&path))
    }

    fn serve(&self) -> Done {
        if self.token_file.is_some() {
            return told("--token-file is a client's: name a HOST, or say by --tokens whom to serve");
        }
        if self.json {
            return told("--json is for the side that measures: name a HOST, or leave it out here");
        }
        let is_said = self.size.is_some()
            || self.all
            || self.iters.is_some()
            || self.duration.is_some()
            || self.tx_depth.is_some()
            || self.atomic_type.is_some()
            || self.chain.is_some()
            || self.report_gbits
            || self.json_file().is_some();
        if is_said {
            note!(
                "farside: what is measured, and how it is told, is said by the client alone: it has no effect here"
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

    /// What perftest offers and nothing here can mean.
    fn refuse_what_is_not_here(&self) -> Done {
        if self.bidirectional {
            return told(
                "-b has both sides ask each other, and a node asks nobody: leave it out, or have a second client \
                 measure what goes the other way at the same time",
            );
        }
        if self.gid_index.is_some() {
            return told(
                "-x chooses an address of an RDMA device, and no fabric here has one: leave it out; HOST is a name or \
                 address, at the server told by --bind",
            );
        }
        Ok(())
    }

    fn request(&self) -> Result<Request, Failure> {
        let kind = self.test.kind();
        if kind != Verb::Atomic && self.atomic_type.is_some() {
            return told("--atomic_type is of atomic_lat and atomic_bw: leave it out, or name one of them");
        }
        if kind != Verb::Chain && self.chain.is_some() {
            return told("--chain is of chain_lat and chain_bw: leave it out, or name one of them");
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
            // What is got must have been put.
            Request::Get | Request::Put => PUT_MAX,
            Request::Call => ECHO_MAX,
            Request::Cas | Request::FetchAdd => {
                let (words, which) = match request {
                    Request::Cas => (&[8, 16][..], "8 or 16"),
                    _ => (&[8][..], "8"),
                };
                if self.all {
                    return told(&format!(
                        "this atomic has {which} bytes and no other sizes: leave --all out"
                    ));
                }
                let size = self.size.unwrap_or(8);
                return match words.iter().find(|&&word| word as u64 == size) {
                    Some(&word) => Ok(vec![word]),
                    None => told(&format!("this atomic has {which} bytes, not {size}: leave --size out")),
                };
            }
        };
        if self.all {
            return Ok((1..usize::BITS).map(|bit| 1 << bit).take_while(|&size| size <= max).collect());
        }
        let default = if self.test.is_latency() { 2 } else { 1 << 15 };
        match self.size.unwrap_or(default) {
            size if size <= max as u64 => Ok(vec![size as usize]),
            size => told(&format!(
                "{size} bytes do not fit into one request of {}, which carries {max} at most: give a smaller --size",
                self.name()
            )),
        }
    }

    /// Of a test of bandwidth.
    fn depth(&self) -> Result<Option<u32>, Failure> {
        match (self.test.is_latency(), self.tx_depth) {
            (true, None) => Ok(None),
            (true, Some(_)) => told(
                "a *_lat test has one request under way at a time: leave --tx-depth out, or name a *_bw test",
            ),
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

    /// The test's, as it is typed.
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

fn told<T>(reason: &str) -> Result<T, Failure> {
    Err(Failure::Told(reason.to_owned()))
}

/// For clap: bytes of a request.
pub(super) fn size(text: &str) -> Result<u64, String> {
    match farside::config::parse_bytes(text)? {
        0 => Err("a request of no bytes has nothing to measure: give 1 or more".into()),
        bytes => Ok(bytes),
    }
}

/// For clap: how long to measure.
pub(super) fn lasting(text: &str) -> Result<Duration, String> {
    let duration = duration(text)?;
    let possible = Duration::from_millis(10)..=Duration::from_secs(1_000_000);
    if possible.contains(&duration) {
        Ok(duration)
    } else {
        Err(format!("'{text}' is too short or too long to measure for: give 10ms to 1000000s"))
    }
}
