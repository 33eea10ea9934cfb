//! `bench floor`: measures the same fetch without a system. The fetch runs in this process. For fabrics that send
//! messages, it is requested from a second process (an *echo*).
//!
//! Invariant: the server process of an echo ends with the process that started it.

use super::{FEWER_RECORDS, FabricArg, seconds};
use crate::cli::node::die_with_parent;
use crate::cli::{Done, Failure, check_available, value_size};
use clap::ValueEnum;
use farside_bench::floor::{Echo, EchoClient, Echoed, HugePages, Layout, Medium};
use farside_bench::report::{EchoCpuSeconds, FloorReport, cpu_time_of, floor_table, own_cpu_time};
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

#[derive(clap::Args)]
#[command(allow_negative_numbers = true)] // Each flag's own parser then rejects a negative number.
pub(in crate::cli) struct Floor {
    /// Fabric whose floor to measure
    #[arg(long, value_enum, default_value_t = FloorFabric::Shm)]
    fabric: FloorFabric,
    #[command(flatten)]
    args: EchoArgs,
    /// Measured seconds
    #[arg(long, value_name = "S", default_value_t = 3.0)]
    seconds: f64,
    /// Pause before each round of requests, and report the latency of the first one after it; requires --blocking
    #[arg(long, value_name = "MS", requires = "blocking", conflicts_with = "seconds")]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=60_000))]
    idle_ms: Option<u64>,
    /// Number of such rounds
    #[arg(long, value_name = "N", requires = "idle_ms", default_value_t = 10)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: u32,
    /// Print the result as one JSON object on the last line
    #[arg(long)]
    json: bool,
}

/// Options that the server needs too.
#[derive(clap::Args)]
struct EchoArgs {
    /// Records in the table
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    records: u64,
    /// Bytes per value, 1 to 16MiB; at most 60KiB if values travel in messages
    #[arg(long, value_name = "BYTES", default_value = "512", value_parser = value_size)]
    value_size: u32,
    /// Fetches overlapped by prefetching, or requests in flight
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    tasks: u32,
    /// Give each key its own slot
    #[arg(long)]
    collision_free: bool,
    /// Omit the fetch: measure the round trip of messages of the same sizes alone; for ring, udp and tcp
    #[arg(long)]
    bare: bool,
    /// Let both sides sleep until a message wakes them, instead of polling; for ring, udp and tcp
    #[arg(long)]
    blocking: bool,
}

/// Server process of a floor that sends messages; its standard input is the channel to the client.
#[derive(clap::Args)]
pub(super) struct FloorServer {
    #[arg(long, value_enum)]
    fabric: FloorFabric,
    #[command(flatten)]
    args: EchoArgs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FloorFabric {
    /// Fetch in this process
    Local,
    /// Fetch in this process, from shared memory
    Shm,
    /// Messages through rings in shared memory; fetch in another process
    Ring,
    /// Datagrams over loopback; fetch in another process
    Udp,
    /// A stream over loopback; fetch in another process
    Tcp,
}

/// Minimum number of bytes of a floor's record besides its value: slots, a header and a key.
const BESIDES_VALUE: u64 = 4 * 16 + 24;

impl Floor {
    pub(super) fn run(self) -> Done {
        let duration = seconds(self.seconds)?;
        let (report, mismatches) = match self.fabric.medium() {
            Some(medium) => self.echo(&self.args.echo(medium), duration)?,
            None => self.measure_fetches(duration)?,
        };
        if self.json {
            print_line!("{}", serde_json::to_string(&report)?);
        } else {
            print_line!("{}", floor_table(&[report]));
        }
        check_mismatches(mismatches)
    }

    /// Measures like `bench floor --fabric FABRIC --tasks K`, and returns the report. Returns `None` if the fabric
    /// sends no messages.
    pub(in crate::cli) fn measure_messages(
        fabric: FabricArg,
        records: u64,
        value_size: u32,
        tasks: u32,
        duration: Duration,
    ) -> Result<Option<FloorReport>, Failure> {
        let fabric = match fabric {
            FabricArg::Ring => FloorFabric::Ring,
            FabricArg::Udp => FloorFabric::Udp,
            FabricArg::Tcp => FloorFabric::Tcp,
            _ => return Ok(None),
        };
        let args =
            EchoArgs { records, value_size, tasks, collision_free: false, bare: false, blocking: false };
        let seconds = duration.as_secs_f64();
        let floor = Floor { fabric, args, seconds, idle_ms: None, rounds: 1, json: false };
        let medium = fabric.medium().expect("these send messages");
        let (report, mismatches) = floor.echo(&floor.args.echo(medium), duration)?;
        check_mismatches(mismatches)?;
        Ok(Some(report))
    }

    fn measure_fetches(&self, duration: Duration) -> Result<(FloorReport, u64), Failure> {
        for (flag, is_given) in [("--bare", self.args.bare), ("--blocking", self.args.blocking)] {
            if is_given {
                return Err(Failure::Error(format!(
                    "{flag} has no meaning for {}, which sends no messages: omit it, or name --fabric ring, udp or tcp",
                    self.fabric.name()
                )));
            }
        }
        self.args.check_memory()?;
        let tasks = self.args.tasks as usize;
        let floor = farside_bench::floor::Floor::build(self.args.layout())?;
        let measured = floor.measure(tasks, duration)?;
        Ok((FloorReport::new(self.fabric.name(), tasks, &measured), measured.mismatches))
    }

    fn echo(&self, echo: &Echo, duration: Duration) -> Result<(FloorReport, u64), Failure> {
        let (mut client, far) = echo.open()?;
        self.args.check_memory()?;
        let server = Server::start(self.fabric, &self.args, far)?;
        let before = (own_cpu_time()?, server.cpu_time()?);
        let echoed = self.measure(&mut client, duration)?;
        let per_mop = |after: Duration, before: Duration| {
            after.saturating_sub(before).as_secs_f64() / echoed.ops as f64 * 1e6
        };
        let cpu = EchoCpuSeconds {
            client: per_mop(own_cpu_time()?, before.0),
            server: per_mop(server.cpu_time()?, before.1),
        };
        let report = FloorReport::of_echo(self.fabric.name(), echo.tasks, server.page_size, &echoed, cpu);
        Ok((report, echoed.mismatches))
    }

    fn measure(&self, client: &mut EchoClient, duration: Duration) -> Result<Echoed, Failure> {
        Ok(match self.idle_ms {
            Some(pause_ms) => client.measure_idle(Duration::from_millis(pause_ms), self.rounds)?,
            None => client.measure(duration)?,
        })
    }
}

/// Fails if a fetch returned the item of another key.
pub(in crate::cli) fn check_mismatches(mismatches: u64) -> Done {
    match mismatches {
        0 => Ok(()),
        wrong => Err(Failure::Error(format!(
            "{wrong} fetches returned another item than that of their key: discard these figures, and check this \
             machine's memory"
        ))),
    }
}

impl EchoArgs {
    fn check_memory(&self) -> Done {
        if self.bare {
            return Ok(());
        }
        check_available(self.records * (u64::from(self.value_size) + BESIDES_VALUE), FEWER_RECORDS)
    }

    fn layout(&self) -> Layout {
        Layout {
            records: self.records,
            value_size: self.value_size,
            collision_free: self.collision_free,
            huge_pages: HugePages::IfAvailable,
            seed: 1,
        }
    }

    fn echo(&self, medium: Medium) -> Echo {
        Echo {
            medium,
            layout: self.layout(),
            tasks: self.tasks as usize,
            bare: self.bare,
            blocking: self.blocking,
        }
    }

    /// Returns the options as command-line arguments for the server.
    fn arguments(&self) -> Vec<String> {
        let numbers = [
            ("--records", self.records),
            ("--value-size", self.value_size.into()),
            ("--tasks", self.tasks.into()),
        ];
        let flags =
            [("--collision-free", self.collision_free), ("--bare", self.bare), ("--blocking", self.blocking)];
        let numbers = numbers.into_iter().flat_map(|(name, number)| [name.into(), number.to_string()]);
        numbers
            .chain(flags.into_iter().filter(|(_, is_given)| *is_given).map(|(name, _)| name.into()))
            .collect()
    }
}

impl FloorFabric {
    fn name(self) -> &'static str {
        match self {
            FloorFabric::Local => "local",
            FloorFabric::Shm => "shm",
            FloorFabric::Ring => "ring",
            FloorFabric::Udp => "udp",
            FloorFabric::Tcp => "tcp",
        }
    }

    /// Returns the medium that carries the fabric's messages, or `None` if the fabric sends none.
    fn medium(self) -> Option<Medium> {
        match self {
            FloorFabric::Local | FloorFabric::Shm => None,
            FloorFabric::Ring => Some(Medium::Ring),
            FloorFabric::Udp => Some(Medium::Udp),
            FloorFabric::Tcp => Some(Medium::Tcp),
        }
    }
}

impl FloorServer {
    pub(super) fn run(self) -> Done {
        die_with_parent()?;
        let Some(medium) = self.fabric.medium() else {
            return Err(Failure::Error(format!(
                "{} has no server: name --fabric ring, udp or tcp",
                self.fabric.name()
            )));
        };
        let far = std::io::stdin().as_fd().try_clone_to_owned()?;
        self.args.echo(medium).serve(far, |page_size| {
            use std::io::Write;
            writeln!(std::io::stdout(), "{page_size}")
        })?;
        Ok(())
    }
}

/// Server process of an echo, seen from its client.
struct Server {
    child: Child,
    page_size: u64,
}

impl Server {
    /// Starts a server on the channel `far` and waits until it has filled its memory.
    fn start(fabric: FloorFabric, args: &EchoArgs, far: OwnedFd) -> Result<Server, Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["bench", "floor-server", "--fabric", fabric.name()])
            .args(args.arguments())
            .stdin(far)
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take();
        let mut server = Server { child, page_size: 0 };
        let mut line = String::new();
        if let Some(output) = output {
            BufReader::new(output).read_line(&mut line)?;
        }
        server.page_size = line.trim_end().parse().map_err(|_| {
            Failure::Error("the floor's server did not start: its output above has the reason".into())
        })?;
        Ok(server)
    }

    fn cpu_time(&self) -> Result<Duration, Failure> {
        Ok(cpu_time_of(self.child.id())?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // This call fails if the server has already exited.
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}
