//! `bench floor`: measures the same reads and overwrites without a system. They run in this process. For fabrics that
//! send messages, they are requested from a second process (an *echo*).
//!
//! Invariant: the server process of an echo ends with the process that started it.
//! Invariant: after overwrites, the whole table is checked before a result is printed.

use super::{FEWER_RECORDS, FabricArg, seconds};
use crate::cli::node::die_with_parent;
use crate::cli::{Done, Failure, check_available, value_size};
use clap::ValueEnum;
use farside_bench::floor::{Echo, EchoClient, Echoed, HugePages, Layout, Medium, Workload};
use farside_bench::report::{EchoCpuSeconds, FloorReport, cpu_time_of, floor_table, own_cpu_time};
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

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
    /// c: reads; a: half reads, half overwrites
    #[arg(long, value_name = "a|c", default_value = "c", value_parser = workload)]
    workload: Workload,
    /// Operations overlapped by prefetching, or requests in flight
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    tasks: u32,
    /// Give each key its own slot
    #[arg(long)]
    collision_free: bool,
    /// Omit the memory accesses: measure the round trip of messages of the same sizes alone; for ring, udp and tcp
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
    /// Memory accesses in this process
    Local,
    /// Memory accesses in this process, to shared memory
    Shm,
    /// Messages through rings in shared memory; memory accesses in another process
    Ring,
    /// Datagrams over loopback; memory accesses in another process
    Udp,
    /// A stream over loopback; memory accesses in another process
    Tcp,
}

/// Minimum number of bytes of a floor's record besides its value: slots, a header and a key.
const BESIDES_VALUE: u64 = 4 * 16 + 24;
/// Maximum time in which a server that has closed its channel checks its table.
const CHECK_TIMEOUT: Duration = Duration::from_secs(120);

impl Floor {
    pub(super) fn run(self) -> Done {
        let duration = seconds(self.seconds)?;
        let (report, mismatches) = match self.fabric.medium() {
            Some(medium) => self.echo(&self.args.echo(medium), duration)?,
            None => self.measure_accesses(duration)?,
        };
        if self.json {
            print_line!("{}", serde_json::to_string(&report)?);
        } else {
            print_line!("{}", floor_table(&[report]));
        }
        check_mismatches(mismatches)
    }

    /// Measures messages alone, like `bench floor --fabric FABRIC --value-size BYTES --tasks K --bare`, and returns the
    /// report. Returns `None` if the fabric sends no messages.
    pub(super) fn measure_bare(
        fabric: FabricArg,
        value_size: u32,
        tasks: u32,
        duration: Duration,
    ) -> Result<Option<FloorReport>, Failure> {
        Floor::measure_as(fabric, duration, |args| EchoArgs {
            records: 1,
            value_size,
            tasks,
            bare: true,
            ..args
        })
    }

    /// Measures like `bench floor --fabric FABRIC --workload WORKLOAD --tasks K`, and returns the report. Returns
    /// `None` if the fabric sends no messages.
    pub(in crate::cli) fn measure_messages(
        fabric: FabricArg,
        workload: Workload,
        records: u64,
        value_size: u32,
        tasks: u32,
        duration: Duration,
    ) -> Result<Option<FloorReport>, Failure> {
        Floor::measure_as(fabric, duration, |args| EchoArgs { records, value_size, workload, tasks, ..args })
    }

    fn measure_as(
        fabric: FabricArg,
        duration: Duration,
        with: impl FnOnce(EchoArgs) -> EchoArgs,
    ) -> Result<Option<FloorReport>, Failure> {
        let fabric = match fabric {
            FabricArg::Ring => FloorFabric::Ring,
            FabricArg::Udp => FloorFabric::Udp,
            FabricArg::Tcp => FloorFabric::Tcp,
            _ => return Ok(None),
        };
        let (collision_free, bare, blocking) = (false, false, false);
        let (records, value_size, workload, tasks) = (1, 1, Workload::C, 1);
        let args = with(EchoArgs { records, value_size, workload, tasks, collision_free, bare, blocking });
        let seconds = duration.as_secs_f64();
        let floor = Floor { fabric, args, seconds, idle_ms: None, rounds: 1, json: false };
        let medium = fabric.medium().expect("these send messages");
        let (report, mismatches) = floor.echo(&floor.args.echo(medium), duration)?;
        check_mismatches(mismatches)?;
        Ok(Some(report))
    }

    fn measure_accesses(&self, duration: Duration) -> Result<(FloorReport, u64), Failure> {
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
        let workload = self.args.workload;
        let mut floor = farside_bench::floor::Floor::build(self.args.layout())?;
        let measured = floor.measure(workload, tasks, duration)?;
        if workload == Workload::A {
            floor.check()?;
        }
        Ok((FloorReport::new(self.fabric.name(), workload, tasks, &measured), measured.mismatches))
    }

    fn echo(&self, echo: &Echo, duration: Duration) -> Result<(FloorReport, u64), Failure> {
        let (mut client, far) = echo.open()?;
        self.args.check_memory()?;
        let mut server = Server::start(self.fabric, &self.args, far)?;
        let before = (own_cpu_time()?, server.cpu_time()?);
        let echoed = self.measure(&mut client, duration)?;
        let per_mop = |after: Duration, before: Duration| {
            after.saturating_sub(before).as_secs_f64() / echoed.ops as f64 * 1e6
        };
        let cpu = EchoCpuSeconds {
            client: per_mop(own_cpu_time()?, before.0),
            server: per_mop(server.cpu_time()?, before.1),
        };
        drop(client);
        if echo.workload == Workload::A {
            server.wait_for_check()?;
        }
        let (fabric, page_size) = (self.fabric.name(), server.page_size);
        let report = FloorReport::of_echo(fabric, echo.workload, echo.tasks, page_size, &echoed, cpu);
        Ok((report, echoed.mismatches))
    }

    fn measure(&self, client: &mut EchoClient, duration: Duration) -> Result<Echoed, Failure> {
        Ok(match self.idle_ms {
            Some(pause_ms) => client.measure_idle(Duration::from_millis(pause_ms), self.rounds)?,
            None => client.measure(duration)?,
        })
    }
}

/// Fails if an operation did not find its key, or returned the item of another key.
pub(in crate::cli) fn check_mismatches(mismatches: u64) -> Done {
    match mismatches {
        0 => Ok(()),
        wrong => Err(Failure::Error(format!(
            "{wrong} operations did not find their key, or returned another item: discard these figures, and check \
             this machine's memory"
        ))),
    }
}

/// Parses, for clap, the workload of a floor.
fn workload(name: &str) -> Result<Workload, String> {
    Workload::named(name).ok_or_else(|| {
        format!(
            "there is no floor of the workload '{name}': give c (reads) or a (half reads, half overwrites)"
        )
    })
}

impl EchoArgs {
    fn check_memory(&self) -> Done {
        if self.bare {
            return Ok(());
        }
        let buffers = self.records + u64::from(self.layout().spares);
        check_available(buffers * (u64::from(self.value_size) + BESIDES_VALUE), FEWER_RECORDS)
    }

    fn layout(&self) -> Layout {
        Layout {
            records: self.records,
            value_size: self.value_size,
            spares: self.workload.spares() * self.tasks,
            collision_free: self.collision_free,
            huge_pages: HugePages::IfAvailable,
            seed: 1,
        }
    }

    fn echo(&self, medium: Medium) -> Echo {
        Echo {
            medium,
            workload: self.workload,
            layout: self.layout(),
            tasks: self.tasks as usize,
            bare: self.bare,
            blocking: self.blocking,
        }
    }

    /// Returns the options as command-line arguments for the server.
    fn arguments(&self) -> Vec<String> {
        let named = [
            ("--records", self.records.to_string()),
            ("--value-size", self.value_size.to_string()),
            ("--workload", self.workload.name().into()),
            ("--tasks", self.tasks.to_string()),
        ];
        let flags =
            [("--collision-free", self.collision_free), ("--bare", self.bare), ("--blocking", self.blocking)];
        let named = named.into_iter().flat_map(|(name, value)| [name.into(), value]);
        named
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

    /// Waits until the server, whose client was dropped, has checked its table and has exited.
    fn wait_for_check(&mut self) -> Done {
        let since = Instant::now();
        let status = loop {
            match self.child.try_wait()? {
                Some(status) => break status,
                None if since.elapsed() < CHECK_TIMEOUT => std::thread::sleep(Duration::from_millis(1)),
                None => {
                    return Err(Failure::Error(format!(
                        "the floor's server did not check its table within {} s: discard these figures",
                        CHECK_TIMEOUT.as_secs()
                    )));
                }
            }
        };
        match status.success() {
            true => Ok(()),
            false => {
                Err(Failure::Error("the floor's server has failed: its output above has the reason".into()))
            }
        }
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
