//! An echo server and its client as tokio tasks over [`Stream`], which reads and writes like a
//! `TcpStream`. Requires the feature `tokio`.
//!
//!     async_echo serve 127.0.0.1:0           serves until the process ends
//!     async_echo visit 127.0.0.1:PORT SIZE   sends SIZE bytes and expects them back

use std::error::Error;

use rnic_client::{Context, Stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

type Failure = Box<dyn Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", address] => runtime.block_on(serve(address)),
        ["visit", address, size] => runtime.block_on(visit(address, size.parse()?)),
        _ => Err("usage: async_echo serve ADDRESS | visit ADDRESS SIZE".into()),
    }
}

async fn serve(address: &str) -> Result<(), Failure> {
    let context = Context::open()?;
    let listener = context.listen(address, 16)?;
    println!("listening on {}", listener.local_addr());
    loop {
        let request = listener.accept_request_async().await?;
        let context = context.clone();
        tokio::spawn(async move {
            if let Err(error) = echo(Stream::accept(&context, request).await?).await {
                eprintln!("{error}");
            }
            Ok::<(), rnic_client::Error>(())
        });
    }
}

/// Echoes all bytes until the peer shuts down.
async fn echo(mut stream: Stream) -> Result<(), Failure> {
    let mut bytes = vec![0; 16 << 10];
    loop {
        let n = stream.read(&mut bytes).await?;
        if n == 0 {
            break;
        }
        stream.write_all(&bytes[..n]).await?;
    }
    stream.shutdown().await?;
    // Keep the stream until everything has been sent.
    stream.qp().wait_disconnected_async().await?;
    Ok(())
}

async fn visit(address: &str, size: usize) -> Result<(), Failure> {
    let stream = Stream::connect(&Context::open()?, address).await?;
    let sent: Vec<u8> = (0..size).map(|n| n as u8).collect();
    let (mut reader, mut writer) = tokio::io::split(stream);
    let to_send = sent.clone();
    // Send and receive concurrently, because neither side can buffer all bytes.
    let writing = tokio::spawn(async move {
        writer.write_all(&to_send).await?;
        writer.shutdown().await
    });
    let mut echoed = Vec::new();
    reader.read_to_end(&mut echoed).await?;
    writing.await??;
    if echoed != sent {
        return Err("the echoed bytes differ from the sent bytes".into());
    }
    println!("{size} bytes echoed");
    Ok(())
}
