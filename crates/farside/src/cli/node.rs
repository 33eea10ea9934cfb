//! `up` and `serve`: a memory node in this process.

use super::{Done, Failure, bytes, duration, human_bytes};
use farside::NewStore;
use farside::config::{default_socket, make_folder_of};
use farside::parts::kinds;
use farside_fabrics::memory::{Mapping, Pages};
use farside_node::host::{Host, Options};
use farside_remote::control::Ask;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

/// Start a memory node with a store 'default'.
#[derive(clap::Args)]
pub(super) struct Up {
    /// Bytes of memory to lend
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = bytes)]
    memory: u64,
    /// Where clients connect [default: where they look for it]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

/// Start a memory node.
#[derive(clap::Args)]
pub(super) struct Serve {
    /// Bytes of memory to lend: a multiple of 1MiB
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = bytes)]
    memory: u64,
    /// Where clients of this host connect [default: where they look for it]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Which pages back the memory: huge ones make random reads faster, if the system has some reserved
    #[arg(long, value_enum, default_value_t = PagesArg::Auto)]
    pages: PagesArg,
    /// Kill a client that was stopped for so long in the middle of an operation, so that memory can come back
    #[arg(long, value_name = "TIME", value_parser = duration)]
    evict_stopped_after: Option<Duration>,
    /// Make this store at once, with all the memory there is; may be given once
    #[arg(long, value_name = "NAME")]
    store: Option<String>,
    /// Items that the table of --store is to have room for
    #[arg(long, value_name = "N", requires = "store")]
    items: Option<u64>,
    /// Give each key of 8 bytes a slot of its own in --store (the paper's collision-free layout)
    #[arg(long, requires = "store")]
    collision_free: bool,
    /// Stop when the process that started this one ends
    #[arg(long)]
    die_with_parent: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum PagesArg {
    /// Huge if enough are reserved
    Auto,
    /// 4 KiB
    Small,
    /// 2 MiB, or an error that says how to reserve them
    Huge,
}

impl From<PagesArg> for Pages {
    fn from(pages: PagesArg) -> Pages {
        match pages {
            PagesArg::Auto => Pages::Auto,
            PagesArg::Small => Pages::Small,
            PagesArg::Huge => Pages::Huge,
        }
    }
}

impl Up {
    pub(super) fn run(self) -> Done {
        let given = self.socket.is_some();
        let serve = Serve {
            memory: self.memory,
            socket: self.socket,
            pages: PagesArg::Auto,
            evict_stopped_after: None,
            store: Some("default".into()),
            items: None,
            collision_free: false,
            die_with_parent: false,
        };
        let socket = serve.socket();
        let pool = if given { format!(" --pool shm:{}", socket.display()) } else { String::new() };
        serve.serve(|| {
            println!("Try in another terminal:");
            println!("  farside kv put greeting hello{pool}");
            println!("  farside kv get greeting{pool}");
            println!("  farside bench ycsb --workload c --records 100000 --pool shm:{}", socket.display());
            println!("Press Ctrl-C to stop; the memory is gone then.");
        })
    }
}

impl Serve {
    pub(super) fn run(self) -> Done {
        self.serve(|| ())
    }

    fn socket(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(default_socket)
    }

    fn serve(self, then: impl FnOnce()) -> Done {
        // Before anything that takes time, so that no signal is missed.
        let mut signals = signal_hook::iterator::Signals::new([
            signal_hook::consts::SIGTERM,
            signal_hook::consts::SIGINT,
            signal_hook::consts::SIGHUP,
        ])?;
        if self.die_with_parent {
            die_with_parent()?;
        }
        let socket = self.socket();
        make_folder_of(&socket).map_err(Failure::Told)?;
        let memory = Mapping::create(self.memory, self.pages.into())?;
        let page_size = memory.page_size().0;
        let options = Options { socket: Some(socket.clone()), evict_stopped_after: self.evict_stopped_after };
        let host = Host::start(memory, kinds(), options)?;
        if let Some(name) = &self.store {
            self.make_store(&host, name)?;
        }
        println!(
            "farside: node pid {} serves {} of memory ({} pages) at shm:{}",
            std::process::id(),
            human_bytes(self.memory),
            human_bytes(page_size),
            socket.display()
        );
        then();
        std::io::stdout().flush()?;
        let signal = signals.forever().next();
        tracing::info!(?signal, "stopping");
        host.stop();
        Ok(())
    }

    /// The store of `--store` has all memory but what its reserve takes.
    fn make_store(&self, host: &Host, name: &str) -> Done {
        const STORE_WAIT: Duration = Duration::from_secs(60);
        let Ok(farside_remote::control::Answer::NodeInfo(info)) = host.ask(Ask::NodeInfo, STORE_WAIT) else {
            return Err(Failure::Told("the node that was just started has no answer".into()));
        };
        let reserve = (info.unassigned_bytes >> 6).clamp(1 << 20, 16 << 20) + (1 << 20);
        let mut new = NewStore::prism_kv(name, info.unassigned_bytes.saturating_sub(reserve) >> 20 << 20);
        (new.items, new.collision_free) = (self.items, self.collision_free);
        host.ask(new.ask(), STORE_WAIT)?;
        Ok(())
    }
}

/// Asks the system to end this process with its parent, and ends it now if that has happened already.
fn die_with_parent() -> Done {
    let parent = rustix::process::getppid();
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    if rustix::process::getppid() != parent {
        return Err(Failure::Told("the process that started this node has ended".into()));
    }
    Ok(())
}
