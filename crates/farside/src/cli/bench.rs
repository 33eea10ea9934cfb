//! `bench`: a system under a workload, or the floor under it.

mod floor;
mod session;

use super::{Done, Failure, duration, value_size, warn_of_unused};
use clap::ValueEnum;
use farside_bench::report::ycsb_table;
use farside_bench::workload::{Distribution, Workload};
use farside_fabrics::layer::delay::Distance;
use farside_fabrics::layer::fault::Faults;
use farside_systems::kv::{pilaf, prism_kv};
pub(super) use session::{Asked, Rounds, Session, TURN, far};
use std::time::Duration;

/// Measure a system, or the physical floor under it.
#[derive(clap::Args)]
pub(super) struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Drive a system through a YCSB workload
    Ycsb(Box<Ycsb>),
    /// Do the same fetch by hand: what the machine allows
    Floor(floor::Floor),
    /// The other end of a floor that sends messages; 'bench floor' starts it
    #[command(hide = true)]
    FloorServer(floor::FloorServer),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum System {
    /// GET is one indirect READ, PUT two chains
    PrismKv,
    /// GET is two READs, PUT a call
    Pilaf,
}

impl System {
    pub(super) fn name(self) -> &'static str {
        match self {
            System::PrismKv => prism_kv::KIND,
            System::Pilaf => pilaf::KIND,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum FabricArg {
    /// A node in this process
    Local,
    /// A node in a process of its own, by shared memory
    Shm,
    /// A node in a process of its own, whose engine is asked over UDP
    Udp,
    /// The same over TCP
    Tcp,
    /// The same over TLS
    #[cfg(feature = "tls")]
    Tls,
    /// The same by rings in shared memory
    Ring,
}

impl FabricArg {
    pub(super) fn name(self) -> &'static str {
        match self {
            FabricArg::Local => "local",
            FabricArg::Shm => "shm",
            FabricArg::Udp => "udp",
            FabricArg::Tcp => "tcp",
            #[cfg(feature = "tls")]
            FabricArg::Tls => "tls",
            FabricArg::Ring => "ring",
        }
    }
}

#[derive(clap::Args, Clone)]
struct Ycsb {
    /// Which system
    #[arg(long, value_enum, default_value = "prism-kv")]
    system: System,
    /// What carries the requests to the node that is started: shm if left out; of the node of --pool its url says it
    #[arg(long, value_enum)]
    fabric: Option<FabricArg>,
    /// a, b, c, or a YCSB property file
    #[arg(long, value_name = "a|b|c|PATH", default_value = "c")]
    workload: String,
    /// Which keys are asked for, in place of what the workload says
    #[arg(long, value_name = "NAME")]
    distribution: Option<String>,
    /// Records in the store
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    records: u64,
    /// Bytes of a value, 1 to 16MiB; of Pilaf less than 60KiB
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = value_size)]
    value_size: u32,
    /// Client threads
    #[arg(long, value_name = "T", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: u32,
    /// Tasks per thread, each with one operation under way
    #[arg(long, value_name = "K", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=64))]
    tasks: u32,
    /// How long to measure, after a warm-up
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    seconds: f64,
    /// Wait so long before each operation: what one costs after idleness, and what idleness costs
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    idle_ms: Option<u64>,
    /// Keys whose slots each task remembers, at most 16777216; 0 for none, and for Pilaf always
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1 << 24))]
    slot_cache: u32,
    /// Give each key a slot of its own, as in the paper's runs
    #[arg(long)]
    collision_free: bool,
    /// Make values prove themselves: nobody may see a key go back, or a value torn
    #[arg(long)]
    verify: bool,
    /// Put the node so far away, one way: what would this be worth over such a network? For example 20us
    #[arg(long, value_name = "TIME", value_parser = one_way)]
    delay: Option<Duration>,
    /// Let datagrams meet with faults, each with a probability: loss, duplicate, reorder (udp alone), delay, reset;
    /// wait=100us..2ms says how long a late one takes, and seed=N draws others. For example loss=0.02,reorder=0.02
    #[arg(long, value_name = "NAME=VALUE,...", value_parser = faults)]
    fault: Option<Faults>,
    /// Use this node instead of starting one; the run makes a store of its own there, and drops it at the end
    #[arg(long, value_name = "URL")]
    pool: Option<String>,
    /// A file with an admin's token that may do all in every store, if the node of --pool asks for one [default:
    /// FARSIDE_TOKEN_FILE, the settings file, or none]
    #[arg(long, value_name = "PATH", requires = "pool")]
    token_file: Option<String>,
    /// A file of certificates, for --pool tls:// alone [default: FARSIDE_TLS_CA, the settings file, or none]
    #[arg(long, value_name = "PATH", requires = "pool")]
    tls_ca: Option<String>,
    /// Send udp:// packets to the node of --pool in the clear although there is a token, if it was started so
    #[arg(long, requires = "pool")]
    insecure_udp: bool,
    /// The result as one JSON object on the last line
    #[arg(long)]
    json: bool,
}

/// For clap: how long one way to the node takes.
fn one_way(text: &str) -> Result<Duration, String> {
    const MOST: Duration = Duration::from_secs(1);
    let one_way = duration(text)?;
    if one_way > MOST {
        return Err(format!(
            "'{text}' one way is farther than any network: give {} s at most",
            MOST.as_secs()
        ));
    }
    Ok(one_way)
}

/// What to do where the memory that is wanted is not there.
const FEWER_RECORDS: &str = "ask for fewer --records or a smaller --value-size";

impl Bench {
    pub(super) fn run(self) -> Done {
        match self.what {
            What::Ycsb(ycsb) => ycsb.run(),
            What::Floor(floor) => floor.run(),
            What::FloorServer(server) => server.run(),
        }
    }
}

impl Ycsb {
    fn run(self) -> Done {
        let mut workload = Workload::resolve(&self.workload)?;
        workload.records = self.records;
        if let Some(name) = &self.distribution {
            workload.distribution = Distribution::named(name).ok_or_else(|| {
                Failure::Told(format!(
                    "there is no distribution '{name}': name one of {}",
                    Distribution::NAMES
                ))
            })?;
        }
        warn_of_unused(&workload);
        if self.pool.is_some() && self.fabric == Some(FabricArg::Local) {
            return Err(Failure::Told(
                "--fabric local has its node in this process: leave --pool out".into(),
            ));
        }
        let duration = seconds(self.seconds)?;
        note!("workload {workload}");
        let asked = Asked {
            system: self.system,
            fabric: self.fabric,
            pool: self.pool.clone(),
            token_file: self.token_file.clone(),
            tls_ca: self.tls_ca.clone(),
            idle: self.idle_ms.map(Duration::from_millis),
            insecure_udp: self.insecure_udp,
            workload,
            value_size: self.value_size as usize,
            threads: self.threads,
            tasks: self.tasks,
            slot_cache: self.slot_cache as usize,
            collision_free: self.collision_free,
            verify: self.verify,
            distance: self.delay.map(|one_way| Distance { one_way, ..Distance::default() }),
            faults: self.fault,
            quiet: false,
        };
        let session = Session::start(asked)?;
        note!("warming up, then measuring for {} s ...", self.seconds);
        let report = session.measure(duration)?;
        if let Some(strikes) = session.strikes() {
            note!("faults: {strikes}");
        }
        drop(session);
        if (report.ops_per_s, report.errors) == (0.0, 0) {
            return Err(Failure::Told(
                "no operation came to its end while it was measured: give more --seconds".into(),
            ));
        }
        if self.json {
            tell!("{}", serde_json::to_string(&report)?);
        } else {
            tell!("{}", ycsb_table(std::slice::from_ref(&report)));
        }
        match (report.errors, report.violations) {
            (0, 0) => Ok(()),
            (errors, violations) => {
                Err(Failure::Told(format!("{errors} operations failed, {violations} values were wrong")))
            }
        }
    }
}

/// For clap: faults, such as `loss=0.02,wait=1ms..5ms,seed=7`.
fn faults(text: &str) -> Result<Faults, String> {
    let mut faults = Faults::default();
    for part in text.split(',') {
        let (name, value) =
            part.split_once('=').ok_or_else(|| format!("'{part}' is no fault: write it like loss=0.02"))?;
        let probability = match name {
            "loss" => &mut faults.loss,
            "duplicate" => &mut faults.duplicate,
            "reorder" => &mut faults.reorder,
            "delay" => &mut faults.delay,
            "reset" => &mut faults.reset,
            "seed" => {
                faults.seed =
                    value.parse().map_err(|_| format!("'{value}' is no seed: give a whole number"))?;
                continue;
            }
            "wait" => {
                let (least, most) = value.split_once("..").unwrap_or((value, value));
                faults.wait = duration(least)?..=duration(most)?;
                continue;
            }
            _ => {
                return Err(format!(
                    "there is no fault '{name}': name loss, duplicate, reorder, delay or reset, or wait or seed"
                ));
            }
        };
        *probability =
            value.parse().map_err(|_| format!("'{value}' is no probability of {name}: give 0 to 1"))?;
    }
    faults.check(false).map_err(|impossible| impossible.0)?;
    Ok(faults)
}

fn seconds(seconds: f64) -> Result<Duration, Failure> {
    if (0.01..=1e6).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(Failure::Told(format!("--seconds {seconds}: give 0.01 to 1000000")))
    }
}
